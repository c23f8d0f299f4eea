"""What routes ask for."""

from typing import Annotated, Any

from fastapi import Depends, File, Form, Query, Request, UploadFile

from api.problems import ReadOnly
from api.service import Service
from indexing.searcher import Searcher
from retrieval.errors import BadConfig, BadImage


def get_service(request: Request) -> Service:
    """The service of this application."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


def get_searcher(service: ServiceDep) -> Searcher:
    """The searcher, or the problem that it is not there yet."""
    return service.searcher


SearcherDep = Annotated[Searcher, Depends(get_searcher)]


def require_writable(service: ServiceDep) -> None:
    """The problem that nothing may be changed, if so."""
    if service.settings.read_only:
        raise ReadOnly("the service was started read-only: start it without --read-only to add or remove images")


WritableDep = Depends(require_writable)


def read_upload(image: Annotated[UploadFile, File(description="The picture.")]) -> bytes:
    """The bytes of the uploaded picture."""
    data = image.file.read()
    if not data:
        raise BadImage("the upload is empty (0 bytes)")
    return data


UploadDep = Annotated[bytes, Depends(read_upload)]


def check_k(service: Service, k: int) -> int:
    """`k` if the service gives so many results."""
    if not 1 <= k <= service.settings.max_k:
        raise BadConfig(f"k is the number of results and must be 1 to {service.settings.max_k:,}, not {k}")
    return k


# The schema says the lower limits, but we check them ourselves: our sentences say more than the framework's.
_K: Any = {
    "description": "Number of results; more than the collection holds gives all.",
    "json_schema_extra": {"minimum": 1},
}
_MAX_DISTANCE: Any = {
    "description": "Leave out what is further away (bits).",
    "json_schema_extra": {"minimum": 0},
}
KForm = Annotated[int, Form(**_K)]
KQuery = Annotated[int, Query(**_K)]
MaxDistanceForm = Annotated[int | None, Form(**_MAX_DISTANCE)]
MaxDistanceQuery = Annotated[int | None, Query(**_MAX_DISTANCE)]
