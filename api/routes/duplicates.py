"""Near-duplicates, and keeping them."""

from typing import Annotated

from fastapi import APIRouter, status

from hashseek.api.messages.parameters import MAX_IN_GROUP, DuplicateParameters, KeptGroup
from hashseek.api.messages.reading import documented_query, query_of
from hashseek.api.messages.schemas import DuplicateGroup, DuplicateGroups, ImageRecord
from hashseek.api.routes.dependencies import NoQueryDep, SearcherDep, ServiceDep, WritableDep, local
from hashseek.indexing.index.duplicates import not_kept
from hashseek.indexing.index.hamming_index import Ids
from hashseek.retrieval.errors import BadConfig

MAX_IMAGES = 1_000_000  # largest collection whose groups the service computes

router = APIRouter(prefix="/v1/duplicates", tags=["duplicates"])


@router.get("", openapi_extra=documented_query(DuplicateParameters))
def duplicates(
    service: ServiceDep,
    searcher: SearcherDep,
    parameters: Annotated[DuplicateParameters, query_of(DuplicateParameters)],
) -> DuplicateGroups:
    """Groups of images linked by chains of neighbours within the radius, by their first id.

    They are computed once for each state of the collection; a request that would have to wait long gets 503. Groups
    whose images were all kept are left out.
    """
    collection, radius, offset = local(searcher), parameters.radius, parameters.offset
    if len(collection) > MAX_IMAGES:
        raise BadConfig(
            f"the collection has {len(collection):,} images, and the service looks for duplicates among at most "
            f"{MAX_IMAGES:,}: use `hashseek index duplicates`"
        )

    def compute() -> list[Ids]:  # holds the searcher, which keeps the collection open
        return list(local(searcher).duplicates(radius=radius, parallel=False))

    found = service.computed.get(("duplicates", radius), collection.catalog, compute)
    left = list(not_kept(found, collection.catalog.kept_groups()))
    following = offset + parameters.limit
    groups = []
    for ids in left[offset:following]:
        images = collection.catalog.get(ids[:MAX_IN_GROUP].tolist())
        records = [ImageRecord.of(stored) for stored in images if stored is not None]
        if records:  # not all were deleted since the groups were computed
            groups.append(DuplicateGroup(size=len(ids), images=records))
    return DuplicateGroups(groups=groups, total=len(left), next_offset=following if following < len(left) else None)


@router.post("/kept", status_code=status.HTTP_204_NO_CONTENT, dependencies=[WritableDep, NoQueryDep])
def keep_duplicates(searcher: SearcherDep, group: KeptGroup) -> None:
    """Keep all of these images: their group is left out until it gains another one."""
    local(searcher).catalog.keep_group(group.ids)
