"""The collections of the service: list, create, delete."""

from typing import Annotated

from fastapi import APIRouter, status
from starlette.concurrency import run_in_threadpool

from hashseek.api.messages.parameters import DeleteCollection, NewCollection
from hashseek.api.messages.reading import documented_query, query_of
from hashseek.api.messages.schemas import CollectionList, CollectionSummary
from hashseek.api.routes.dependencies import CollectionsDep, NoQueryDep, WritableFolderDep
from hashseek.retrieval.errors import BadConfig

router = APIRouter(prefix="/v1/collections", tags=["collections"])
changes = APIRouter(prefix="/v1/collections", tags=["collections"])  # only if several are served


@router.get("", dependencies=[NoQueryDep])
def list_collections(collections: CollectionsDep) -> CollectionList:
    """The collections by name. A single collection is at /, one of several at /collections/NAME/."""
    return CollectionList(collections=[service.summary() for service in collections])


@changes.post("", status_code=status.HTTP_201_CREATED, dependencies=[WritableFolderDep, NoQueryDep])
def create_collection(collections: CollectionsDep, body: NewCollection) -> CollectionSummary:
    """Create an empty collection with the checkpoint of another one."""
    return collections.create(body.name, like=body.like).summary()


@changes.delete(
    "/{name}",
    status_code=status.HTTP_204_NO_CONTENT,
    dependencies=[WritableFolderDep],
    openapi_extra=documented_query(DeleteCollection),
)
async def delete_collection(
    name: str, collections: CollectionsDep, parameters: Annotated[DeleteCollection, query_of(DeleteCollection)]
) -> None:
    """Delete a collection with everything in its folder. Requests in progress are answered first; new ones get 404."""
    service = collections.get(name)
    service.check_writable()
    if parameters.confirm != name:
        raise BadConfig(f"nothing was deleted: confirm must be the collection's name, got {parameters.confirm[:80]!r}")
    service.leaving = True  # here, on the event loop, where no request is about to begin with it
    await run_in_threadpool(collections.delete, service)
