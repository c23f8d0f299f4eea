"""Searching with an uploaded image, a vector, or a stored image or vector."""

from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from hashseek.api.dependencies import MULTIPART, NoQueryDep, SearcherDep, ServiceDep
from hashseek.api.parameters import SearchForm, SearchParameters, SearchVector
from hashseek.api.schemas import SearchAnswer
from hashseek.indexing.searcher import Answer, Searcher

router = APIRouter(prefix="/v1", tags=["search"])


class _JsonRoute(APIRoute):
    """A route for JSON bodies only; the next route of the same path takes the others."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether the route answers a request."""
        match, child = super().matches(scope)
        kind = dict(scope.get("headers", ())).get(b"content-type", b"")
        is_json = kind.partition(b";")[0].strip().lower() == b"application/json"
        return (match, child) if is_json or match is not Match.FULL else (Match.NONE, {})


# Before `search`. The documentation has one operation per path and method, so that describes this body, too.
json_router = APIRouter(prefix="/v1", route_class=_JsonRoute)


@json_router.post("/search", dependencies=[NoQueryDep], include_in_schema=False)
def search_vector(service: ServiceDep, searcher: SearcherDep, body: SearchVector) -> SearchAnswer:
    """The stored vectors most similar to a vector."""
    options = body.options(max_k=service.settings.max_k)
    [answer] = searcher.search_vectors(np.array([body.vector]), options)
    return _answer(searcher, answer)


_JSON_BODY = {"requestBody": {"content": {"application/json": {"schema": SearchVector.model_json_schema()}}}}


@router.post("/search", dependencies=[NoQueryDep], openapi_extra=_JSON_BODY)
def search(service: ServiceDep, searcher: SearcherDep, form: Annotated[SearchForm, MULTIPART]) -> SearchAnswer:
    """The stored images most similar to an uploaded one. Only images that pass the filters are ranked.

    A collection of vectors is searched with a JSON body instead: the same parameters, and `vector`.
    """
    options = form.options(max_k=service.settings.max_k)
    return _answer(searcher, searcher.search_file(form.content(), options, name="the upload"))


@router.get("/images/{image_id}/similar")
def similar(
    image_id: int, service: ServiceDep, searcher: SearcherDep, parameters: Annotated[SearchParameters, Query()]
) -> SearchAnswer:
    """The stored images most similar to a stored one, which is among them if it passes the filters."""
    return _answer(searcher, searcher.similar(image_id, parameters.options(max_k=service.settings.max_k)))


def _answer(searcher: Searcher, answer: Answer) -> SearchAnswer:
    collection = searcher.collection
    return SearchAnswer.of(
        answer, n_bits=collection.n_bits, n_images=len(collection), fingerprint=collection.fingerprint
    )
