"""What routes depend on: the service, its searcher, and the right to write.

Nothing here blocks, so all are `async`: FastAPI would otherwise run each of them in a thread.
"""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Header, Path, Request

from hashseek.api.access.repeats import HEADER, MAX_LENGTH
from hashseek.api.collections.collections import Collections
from hashseek.api.collections.service import Service
from hashseek.api.messages.parameters import NoParameters
from hashseek.api.messages.reading import query_of
from hashseek.api.messages.schemas import url_prefix
from hashseek.indexing.collection import Collection
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.errors import BadConfig

URL_SECONDS = 10.0  # for a download during a request; after that, the client gets an error


async def get_collections(request: Request) -> Collections:
    """The collections of this application."""
    collections: Collections = request.app.state.collections
    return collections


CollectionsDep = Annotated[Collections, Depends(get_collections)]


async def get_service(request: Request) -> Service:
    """The collection that the path names, or the only one."""
    service = (await get_collections(request)).get(request.path_params.get("collection", ""))
    url_prefix.set(service.url_prefix)
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


async def get_searcher(service: ServiceDep) -> AsyncIterator[Searcher]:
    """The searcher, or an error while there is none. The collection is kept until the request is answered."""
    searcher = service.searcher
    service.in_use += 1
    try:
        yield searcher
    finally:
        service.in_use -= 1


SearcherDep = Annotated[Searcher, Depends(get_searcher)]


def local(searcher: Searcher) -> Collection:
    """The collection, if it is in a folder.

    Raises:
        BadConfig: it is in Milvus.
    """
    if not isinstance(searcher.collection, Collection):
        raise BadConfig(f"{searcher.collection.place} is not a folder: this request needs a collection in a folder")
    return searcher.collection


async def name_collection(collection: Annotated[str, Path(description="Name of the collection.")]) -> None:
    """Tell the OpenAPI document that the path has a name; `get_service` reads it."""


_RepeatHeader = Annotated[  # read by `RepeatedChanges`
    str | None,
    Header(
        alias=HEADER,
        max_length=MAX_LENGTH,
        description="A new value for each change; a change sent again with the same value is made only once.",
    ),
]


async def require_writable(service: ServiceDep, _: _RepeatHeader = None) -> None:
    """Raise `ReadOnly` if the collection may not be changed."""
    service.check_writable()


async def require_writable_folder(collections: CollectionsDep, _: _RepeatHeader = None) -> None:
    """Raise `ReadOnly` if no collection may be created or deleted."""
    collections.check_writable()


async def refuse_body(request: Request) -> None:
    """Refuse a body: a filter in it would be ignored."""
    if request.headers.get("content-length", "0") != "0":
        raise BadConfig("nothing was deleted: this request accepts filters only in the query string, not in a body")


WritableDep = Depends(require_writable)
WritableFolderDep = Depends(require_writable_folder)
NoQueryDep = query_of(NoParameters)
