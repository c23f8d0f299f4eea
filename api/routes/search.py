"""Searching with an uploaded image, a vector, or a stored image or vector."""

from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from hashseek.api.dependencies import MULTIPART, NoQueryDep, SearcherDep, ServiceDep
from hashseek.api.parameters import SearchForm, SearchParameters, SearchVector
from hashseek.api.schemas import HitRecord, SearchAnswer
from hashseek.api.service import Service
from hashseek.indexing.searcher import Answer, Searcher, SearchOptions

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
    return _answer(service, searcher, options, answer)


_JSON_BODY = {"requestBody": {"content": {"application/json": {"schema": SearchVector.model_json_schema()}}}}


@router.post("/search", dependencies=[NoQueryDep], openapi_extra=_JSON_BODY)
def search(service: ServiceDep, searcher: SearcherDep, form: Annotated[SearchForm, MULTIPART]) -> SearchAnswer:
    """The stored images most similar to an uploaded one. Only images that pass the filters are ranked.

    A collection of vectors is searched with a JSON body instead: the same parameters, and `vector`.
    """
    options = form.options(max_k=service.settings.max_k)
    return _answer(service, searcher, options, searcher.search_file(form.content(), options, name="the upload"))


@router.get("/images/{image_id}/similar")
def similar(
    image_id: int, service: ServiceDep, searcher: SearcherDep, parameters: Annotated[SearchParameters, Query()]
) -> SearchAnswer:
    """The stored images most similar to a stored one, which is among them if it passes the filters."""
    options = parameters.options(max_k=service.settings.max_k)
    return _answer(service, searcher, options, searcher.similar(image_id, options))


def _answer(service: Service, searcher: Searcher, options: SearchOptions, answer: Answer) -> SearchAnswer:
    collection, following = searcher.collection, options.offset + options.k
    return SearchAnswer(
        n_bits=collection.n_bits,
        n_images=len(collection),
        fingerprint=collection.fingerprint,
        encode_ms=round(answer.encode_ms, 3),
        search_ms=round(answer.search_ms, 3),
        ranked_by=answer.rank,
        is_exact=answer.is_exact,
        next_offset=following if answer.is_full and following + options.k <= service.settings.max_k else None,
        histogram=None if answer.histogram is None else answer.histogram.tolist(),
        hits=[HitRecord(**{**vars(hit.image), **vars(hit)}) for hit in answer.hits],
    )
