"""Searching, with a new picture or a stored one."""

from fastapi import APIRouter

from hashseek.api.dependencies import (
    EffortForm,
    EffortQuery,
    FilterForm,
    FilterQuery,
    KForm,
    KQuery,
    MaxDistanceForm,
    MaxDistanceQuery,
    MinPrecisionForm,
    MinPrecisionQuery,
    SearcherDep,
    ServiceDep,
    UploadDep,
    check_k,
)
from hashseek.api.schemas import Hits
from hashseek.indexing.searcher import Answer, Searcher, SearchOptions

router = APIRouter(prefix="/v1", tags=["search"])


@router.post("/search")
def search(
    image: UploadDep,
    service: ServiceDep,
    searcher: SearcherDep,
    among: FilterForm,
    k: KForm = None,
    max_distance: MaxDistanceForm = None,
    min_precision: MinPrecisionForm = None,
    effort: EffortForm = None,
) -> Hits:
    """The stored images most similar to an uploaded picture; only those that the filter lets through are ranked."""
    k = check_k(service, k)
    picture = searcher.decode(image, name="the upload")
    options = SearchOptions(k, max_distance, min_precision, among, effort)
    [answer] = searcher.search([picture.image], options)
    return _hits(searcher, answer)


@router.get("/images/{image_id}/similar")
def similar(
    image_id: int,
    service: ServiceDep,
    searcher: SearcherDep,
    among: FilterQuery,
    k: KQuery = None,
    max_distance: MaxDistanceQuery = None,
    min_precision: MinPrecisionQuery = None,
    effort: EffortQuery = None,
) -> Hits:
    """The stored images most similar to a stored one, itself among them if the filter lets it through."""
    k = check_k(service, k)
    answer = searcher.similar(image_id, SearchOptions(k, max_distance, min_precision, among, effort))
    return _hits(searcher, answer)


def _hits(searcher: Searcher, answer: Answer) -> Hits:
    collection = searcher.collection
    return Hits.of(answer, n_bits=collection.n_bits, n_images=len(collection), fingerprint=collection.fingerprint)
