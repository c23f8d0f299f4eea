"""What routes depend on: the service, its searcher, and the right to write.

Nothing here waits, so all are `async`: FastAPI would run each of the others in a thread.
"""

from typing import Annotated

from fastapi import Depends, Form, Query, Request

from hashseek.api.collections.service import Service
from hashseek.api.messages.parameters import NoParameters
from hashseek.api.messages.problems import ReadOnly
from hashseek.indexing.searcher import Searcher


async def get_service(request: Request) -> Service:
    """The service of this application."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


async def get_searcher(service: ServiceDep) -> Searcher:
    """The searcher, or an error while there is none."""
    return service.searcher


SearcherDep = Annotated[Searcher, Depends(get_searcher)]


async def require_writable(service: ServiceDep) -> None:
    """Raise `ReadOnly` if the service may not change the collection."""
    if service.settings.read_only:
        raise ReadOnly("the service was started read-only: start it without --read-only to add or remove images")


async def refuse_query(_: Annotated[NoParameters, Query()]) -> None:
    """Refuse every parameter in the query string."""


WritableDep = Depends(require_writable)
NoQueryDep = Depends(refuse_query)
MULTIPART = Form(media_type="multipart/form-data")
