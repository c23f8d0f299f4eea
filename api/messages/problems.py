"""Turns every error into problem JSON (RFC 9457): a type for programs, one message for people, never a traceback."""

import errno
import logging
import reprlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Mount

from hashseek.api.decoding import OutOfMemory, Overloaded
from hashseek.api.messages.schemas import ProblemDetails
from hashseek.api.monitoring.logs import ID_HEADER, request_id
from hashseek.api.monitoring.metrics import ERRORS
from hashseek.indexing.catalog import CatalogLocked, CatalogReplaced, DiskFull, SpaceRetired
from hashseek.indexing.milvus.connection import StoreUnavailable
from hashseek.indexing.milvus_uri import is_in_milvus, without_uri
from hashseek.retrieval.errors import BadCollection, BadImage, ForeignCodes, HashseekError, UnknownImage

log = logging.getLogger("hashseek")

MEDIA_TYPE = "application/problem+json"


class NotReady(HashseekError):
    """The collection and its model are still loading."""


class NotLoaded(HashseekError):
    """The collection or its model could not be loaded."""


class ReadOnly(HashseekError):
    """The collection may not be changed."""


class UnknownCollection(HashseekError):
    """There is no collection with this name."""


class UnknownReport(HashseekError):
    """There is no report with this name."""


class CollectionExists(HashseekError):
    """There is already a collection with this name."""


class StillComputing(HashseekError):
    """A result that takes long to compute is not there yet."""


class UnexpectedNumber(HashseekError):
    """The number of images to delete is not the expected one."""


class FileGone(HashseekError):
    """An image is stored, but its file is gone."""


class FileNotSent(HashseekError):
    """An image was indexed by URL, and its host does not send it now."""


# The first class that matches decides.
STATUS: dict[type[Exception], HTTPStatus] = {
    NotReady: HTTPStatus.SERVICE_UNAVAILABLE,
    NotLoaded: HTTPStatus.INTERNAL_SERVER_ERROR,  # 503 would make clients retry forever
    ReadOnly: HTTPStatus.FORBIDDEN,
    FileGone: HTTPStatus.GONE,
    FileNotSent: HTTPStatus.BAD_GATEWAY,
    UnknownImage: HTTPStatus.NOT_FOUND,
    UnknownCollection: HTTPStatus.NOT_FOUND,
    UnknownReport: HTTPStatus.NOT_FOUND,
    CollectionExists: HTTPStatus.CONFLICT,
    BadImage: HTTPStatus.UNPROCESSABLE_ENTITY,
    ForeignCodes: HTTPStatus.CONFLICT,
    UnexpectedNumber: HTTPStatus.CONFLICT,
    CatalogLocked: HTTPStatus.SERVICE_UNAVAILABLE,
    CatalogReplaced: HTTPStatus.SERVICE_UNAVAILABLE,  # the service opens the new one
    SpaceRetired: HTTPStatus.SERVICE_UNAVAILABLE,
    StoreUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    Overloaded: HTTPStatus.SERVICE_UNAVAILABLE,
    OutOfMemory: HTTPStatus.INTERNAL_SERVER_ERROR,  # likewise
    StillComputing: HTTPStatus.SERVICE_UNAVAILABLE,
    DiskFull: HTTPStatus.INSUFFICIENT_STORAGE,
    BadCollection: HTTPStatus.INTERNAL_SERVER_ERROR,
    HashseekError: HTTPStatus.UNPROCESSABLE_ENTITY,
}


def problem(
    status: int, detail: str, *, kind: str = "about:blank", headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A problem JSON response."""
    return _response(_details(status, detail, kind), headers)


def _response(content: ProblemDetails, headers: Mapping[str, str] | None = None) -> JSONResponse:
    headers = {ID_HEADER: content.request_id, **(headers or {})}
    if content.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers = {"Retry-After": "1", **headers}
    return JSONResponse(content.model_dump(), status_code=content.status, media_type=MEDIA_TYPE, headers=headers)


def _details(status: int, detail: str, kind: str) -> ProblemDetails:
    ERRORS.labels(kind.removeprefix("urn:hashseek:")).inc()
    title = HTTPStatus(status).phrase
    return ProblemDetails(type=kind, title=title, status=int(status), detail=detail, request_id=request_id.get())


def describe(request: Request, error: HashseekError | OSError) -> ProblemDetails:
    """What the client sees of an error. Errors that no client can fix are also logged.

    An OSError means that the service cannot read or write its files, most often because a disk is full.
    """
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # the disk, or the quota
        log.error("%s %s failed: %s", request.method, request.url.path, error, exc_info=None if is_full else error)
        status = HTTPStatus.INSUFFICIENT_STORAGE if is_full else HTTPStatus.INTERNAL_SERVER_ERROR
        detail = f"the service could not read or write its files: {error.strerror or error}"
        return _details(status, detail, "urn:hashseek:Storage")
    status = next(code for kind, code in STATUS.items() if isinstance(error, kind))
    if (
        isinstance(error, BadCollection | OutOfMemory)
        and status >= HTTPStatus.INTERNAL_SERVER_ERROR
        and not isinstance(error, CatalogReplaced | SpaceRetired)
    ):
        log.error("%s %s: %s", request.method, request.url.path, error)
    place = request.app.state.collections.settings.collection  # clients need not know where it is
    detail = without_uri(place, str(error)) if is_in_milvus(place) else _without_folder(place, str(error))
    return _details(status, detail, f"urn:hashseek:{type(error).__name__}")


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem JSON."""

    @app.exception_handler(HashseekError)
    @app.exception_handler(OSError)
    def known(request: Request, error: HashseekError | OSError) -> JSONResponse:
        return _response(describe(request, error))

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        detail = _explain(error.errors(), request.headers.get("content-type", ""))
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail, kind="urn:hashseek:BadRequest")

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> Response:
        if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
            detail = str(error.detail)
            if error.status_code == HTTPStatus.NOT_FOUND and request.app.state.collections.several:
                detail += "; this service has several collections: /v1/collections lists their URLs"
            return problem(error.status_code, detail, headers=error.headers)
        headers = {"Allow": ", ".join(_methods(request))}  # of all routes of the path; Starlette knows one of them
        if request.method == "OPTIONS":
            return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)
        return problem(error.status_code, f"this path allows only {headers['Allow']}", headers=headers)

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        detail = "internal error: see the service's log"
        return problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail)


def _explain(errors: Sequence[Any], content_type: str) -> str:
    """What is wrong with a request, from the errors of its validation, as a sentence about one of them."""
    unknown = [one for one in errors if one["type"] == "extra_forbidden"]
    first = (unknown or errors)[0]  # a misspelt name is also why another one is missing
    name = ".".join(str(part) for part in first["loc"][1:]) or "body"
    if first["type"] == "missing":
        detail = f"the parameter {name!r} is missing"
    elif first["type"] == "extra_forbidden":
        where = "query string" if first["loc"][0] == "query" else "request body"
        missing = [str(one["loc"][-1]) for one in errors if one["type"] == "missing"]
        also = f", which has no {missing[0]}" if missing else ""
        detail = f"unknown parameter {name[:40]!r} in the {where}{also}: nothing was done; /docs lists the parameters"
    elif first["type"] == "json_invalid" and isinstance(first["loc"][-1], int):  # a place in the body, not a field
        detail = f"the request body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
    elif first["type"] == "json_invalid":
        detail = f"{name} is not valid JSON: {first['ctx']['error']}"
    elif first["type"] == "value_error":  # our own message, which names the value
        message = str(first["ctx"]["error"])
        detail = f"{name}: {message[0].lower()}{message[1:]}"
    else:
        value = f" is {reprlib.repr(first['input'])}" if isinstance(first["input"], str | int | float) else ""
        detail = f"{name}{value}: {first['msg'][0].lower()}{first['msg'][1:]}"
    # The error that JSON instead of a form leads to, and a form instead of JSON; with another type, every one.
    wrong = {"application/json": ("body", "image"), "multipart/form-data": ("body",)}
    if first["loc"][0] == "body" and first["loc"] == wrong.get(content_type.partition(";")[0], first["loc"]):
        detail += f"; the Content-Type is {content_type[:40]!r}: forms need multipart/form-data, JSON application/json"
    return detail


def _without_folder(folder: Path, detail: str) -> str:
    full = folder.absolute()
    return detail.replace(f"{full}/", "").replace(str(full), full.name)


def _methods(request: Request) -> list[str]:
    """The methods that the path of a request allows."""

    def takes(method: str) -> bool:
        scope = {**request.scope, "method": method, "root_path": ""}  # a mounted folder has set another
        routes = [route for route in request.app.routes if method == "GET" or not isinstance(route, Mount)]
        return any(route.matches(scope)[0] is Match.FULL for route in routes)

    found = [method for method in ("GET", "POST", "PUT", "PATCH", "DELETE") if takes(method)]
    return [*found, *(["HEAD"] if "GET" in found else []), "OPTIONS"]
