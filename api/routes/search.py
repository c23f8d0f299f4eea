"""Searching with an uploaded image or a stored one."""

from typing import Annotated

from fastapi import APIRouter, Query

from hashseek.api.dependencies import MULTIPART, NoQueryDep, SearcherDep, ServiceDep
from hashseek.api.parameters import SearchForm, SearchParameters
from hashseek.api.schemas import SearchAnswer
from hashseek.indexing.searcher import Answer, Searcher

router = APIRouter(prefix="/v1", tags=["search"])


@router.post("/search", dependencies=[NoQueryDep])
def search(service: ServiceDep, searcher: SearcherDep, form: Annotated[SearchForm, MULTIPART]) -> SearchAnswer:
    """The stored images most similar to an uploaded one. Only images that pass the filters are ranked."""
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
