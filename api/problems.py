"""Turns every error into problem JSON (RFC 9457): a type for programs, one sentence for people, never a traceback."""

import errno
import logging
from collections.abc import Collection, Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hashseek.api.logs import ID_HEADER, request_id
from hashseek.api.metrics import ERRORS
from hashseek.indexing.catalog import CatalogLocked, CatalogReplaced, DiskFull, SpaceRetired
from hashseek.indexing.searcher import Overloaded
from hashseek.retrieval.errors import BadCollection, BadImage, ForeignCodes, HashseekError, UnknownImage

log = logging.getLogger("hashseek")

MEDIA_TYPE = "application/problem+json"


class NotReady(HashseekError):
    """The collection and its model are still loading."""


class NotLoaded(HashseekError):
    """The collection or its model could not be loaded."""


class ReadOnly(HashseekError):
    """The service was started read-only."""


class UnexpectedNumber(HashseekError):
    """Other images than expected would have been deleted."""


class FileGone(HashseekError):
    """An image is stored, but its file is gone."""


# The first matching class decides.
STATUS: dict[type[Exception], HTTPStatus] = {
    NotReady: HTTPStatus.SERVICE_UNAVAILABLE,
    NotLoaded: HTTPStatus.INTERNAL_SERVER_ERROR,  # 503 would tell clients to retry for ever
    ReadOnly: HTTPStatus.FORBIDDEN,
    FileGone: HTTPStatus.GONE,
    UnknownImage: HTTPStatus.NOT_FOUND,
    BadImage: HTTPStatus.UNPROCESSABLE_ENTITY,
    ForeignCodes: HTTPStatus.CONFLICT,
    UnexpectedNumber: HTTPStatus.CONFLICT,
    CatalogLocked: HTTPStatus.SERVICE_UNAVAILABLE,
    CatalogReplaced: HTTPStatus.SERVICE_UNAVAILABLE,  # the service opens the new one
    SpaceRetired: HTTPStatus.SERVICE_UNAVAILABLE,
    Overloaded: HTTPStatus.SERVICE_UNAVAILABLE,
    DiskFull: HTTPStatus.INSUFFICIENT_STORAGE,
    BadCollection: HTTPStatus.INTERNAL_SERVER_ERROR,
    HashseekError: HTTPStatus.UNPROCESSABLE_ENTITY,
}


def problem(
    status: int, detail: str, *, kind: str = "about:blank", headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A problem JSON response."""
    own = request_id.get()
    content = {"type": kind, "title": HTTPStatus(status).phrase, "status": int(status), "detail": detail}
    content["request_id"] = own
    ERRORS.labels(kind.removeprefix("urn:hashseek:")).inc()
    headers = {ID_HEADER: own, **(headers or {})}
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers = {"Retry-After": "1", **headers}
    return JSONResponse(content, status_code=status, media_type=MEDIA_TYPE, headers=headers)


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem JSON."""

    @app.exception_handler(HashseekError)
    def ours(request: Request, error: HashseekError) -> JSONResponse:
        status = next(code for kind, code in STATUS.items() if isinstance(error, kind))
        if isinstance(error, BadCollection) and status >= HTTPStatus.INTERNAL_SERVER_ERROR:  # no client can fix it
            log.error("%s %s: %s", request.method, request.url.path, error)
        return problem(status, str(error), kind=f"urn:hashseek:{type(error).__name__}")

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:]) or "body"
        if first["type"] == "missing":
            detail = f"the request has no {name}"
        elif first["type"] == "extra_forbidden":
            where = "query string" if first["loc"][0] == "query" else "request body"
            detail = f"unknown parameter {name[:40]!r} in the {where}: nothing was done, see /docs"
        else:
            detail = f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}"
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail, kind="urn:hashseek:BadRequest")

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> Response:
        if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
            return problem(error.status_code, str(error.detail), headers=error.headers)
        headers = {"Allow": ", ".join(_methods(request))}  # of all routes of the path; Starlette knows one of them
        if request.method == "OPTIONS":
            return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)
        return problem(error.status_code, f"this path takes {headers['Allow']}", headers=headers)

    @app.exception_handler(OSError)
    def system(request: Request, error: OSError) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        status = HTTPStatus.INSUFFICIENT_STORAGE if full else HTTPStatus.INTERNAL_SERVER_ERROR
        detail = f"the service could not read or write its files: {error.strerror or error}"
        return problem(status, detail, kind="urn:hashseek:Storage")

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        detail = "internal error: see the log of the service"
        return problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail)


def _methods(request: Request) -> list[str]:
    """The methods that the path of a request takes."""

    def takes(method: str) -> bool:
        scope = {**request.scope, "method": method, "root_path": ""}  # a mounted folder has set another
        routes = [route for route in request.app.routes if method == "GET" or not isinstance(route, Mount)]
        return any(route.matches(scope)[0] is Match.FULL for route in routes)

    found = [method for method in ("GET", "POST", "PUT", "PATCH", "DELETE") if takes(method)]
    return [*found, *(["HEAD"] if "GET" in found else []), "OPTIONS"]


_HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}


class RequestLimits:
    """Refuses requests before their bodies are read: too large, too many at once, or not from this service's own page.

    Also answers HEAD like GET, and adds the headers that every answer has.

    Args:
        app: answers the others.
        max_bytes: of a body.
        max_changing: requests with a body, or that change something, that may be in progress.
        hosts: names in the Host header that are answered; empty: all. A page of another site whose name was made to
            lead here (DNS rebinding) still sends its own name.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_changing: int, hosts: Collection[str] = ()) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_changing = max_changing
        self.hosts = hosts
        self._in_progress = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400, 403, 411, 413, 421 or 503."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, is_head = Headers(scope=scope), scope["method"] == "HEAD"
        changing = scope["method"] not in ("GET", "HEAD", "OPTIONS")

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        refusal = self._wrong_host(headers)
        if refusal is None and changing:
            refusal = self._foreign_page(headers) or self._wrong_body(headers) or self._too_many()
        if refusal is not None:
            await refusal(scope, receive, answer)
            return
        if is_head:  # the same as GET, without the body; FastAPI's routes know only GET
            scope = {**scope, "method": "GET"}
        self._in_progress += changing
        try:
            await self.app(scope, receive, answer)
        finally:
            self._in_progress -= changing

    def _wrong_host(self, headers: Headers) -> Response | None:
        name = _host_name(headers.get("host", ""))
        if not self.hosts or name in self.hosts:
            return None
        detail = f"the host {name[:80]!r} is not served: start the service with --allowed-host NAME to allow it"
        return problem(HTTPStatus.MISDIRECTED_REQUEST, detail, kind="urn:hashseek:WrongHost")

    @staticmethod
    def _foreign_page(headers: Headers) -> Response | None:
        """Browsers name the page that sends a request; other programs do not."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        same = origin is None or origin.partition("://")[2] == headers.get("host")
        if same and site in ("none", "same-origin"):
            return None
        detail = "a page of another site may not change or search this collection"
        return problem(HTTPStatus.FORBIDDEN, detail, kind="urn:hashseek:ForeignPage")

    def _wrong_body(self, headers: Headers) -> Response | None:
        length = headers.get("content-length")
        if length is None:
            if "transfer-encoding" not in headers:
                return None
            return problem(HTTPStatus.LENGTH_REQUIRED, "send the upload with a Content-Length")
        if not length.isascii() or not length.isdigit():
            return problem(HTTPStatus.BAD_REQUEST, "the Content-Length is not a number")
        if int(length) > self.max_bytes:
            detail = f"the upload has {int(length):,} bytes; the limit is {self.max_bytes:,}"
            return problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, kind="urn:hashseek:TooLarge")
        return None

    def _too_many(self) -> Response | None:
        if self._in_progress < self.max_changing:
            return None
        detail = f"the service already works on {self.max_changing} uploads and changes: try again in a second"
        return problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, kind="urn:hashseek:Overloaded")


def _host_name(host: str) -> str:
    """The name or IP address in a Host header, without the port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower()
