"""Searching, with a new picture or a stored one."""

from fastapi import APIRouter

from api.dependencies import (
    KForm,
    KQuery,
    MaxDistanceForm,
    MaxDistanceQuery,
    SearcherDep,
    ServiceDep,
    UploadDep,
    check_k,
)
from api.schemas import Hits
from indexing.searcher import Answer, Searcher

router = APIRouter(prefix="/v1", tags=["search"])


@router.post("/search")
def search(
    image: UploadDep,
    service: ServiceDep,
    searcher: SearcherDep,
    k: KForm = 10,
    max_distance: MaxDistanceForm = None,
) -> Hits:
    """The stored images most similar to an uploaded picture."""
    check_k(service, k)
    picture = searcher.decode(image, name="the upload")
    [answer] = searcher.search([picture.image], k=k, max_distance=max_distance)
    return _hits(searcher, answer)


@router.get("/images/{image_id}/similar")
def similar(
    image_id: int, service: ServiceDep, searcher: SearcherDep, k: KQuery = 10, max_distance: MaxDistanceQuery = None
) -> Hits:
    """The stored images most similar to a stored one, itself among them."""
    return _hits(searcher, searcher.similar(image_id, k=check_k(service, k), max_distance=max_distance))


def _hits(searcher: Searcher, answer: Answer) -> Hits:
    collection = searcher.collection
    return Hits.of(answer, n_bits=collection.n_bits, n_images=len(collection), fingerprint=collection.fingerprint)
