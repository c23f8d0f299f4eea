"""Refuses requests before their bodies are read: without a key, too large, too many, or from pages of other sites."""

import re
import time
from http import HTTPStatus
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hashseek.api.keys import Key, KeyFile, Role
from hashseek.api.messages.problems import problem
from hashseek.api.messages.reading import MAX_JSON
from hashseek.api.settings import Settings

COOKIE = "hashseek_key"  # requests for a page's pictures cannot carry a header

_COLLECTION = re.compile(r"/collections/[^/]+(?=/|$)")  # prefix of the paths of one of several collections
# Paths that need no key: they reveal nothing about the collection. Every other path needs one, including future ones.
_OPEN = re.compile(r"/?|/healthz/(live|ready)|/openapi\.json|/(docs|redoc)(/.*)?|/(web|static-offline-docs)/.*")
# Requests that change nothing, although they are not GET. Every other request needs the role write.
_READING = re.compile(r"/v1/(search|encode|session)(/.*)?")
_READ_METHODS = ("GET", "HEAD", "OPTIONS")

# Bytes of a body that is read before its request counts as in progress. Otherwise a few connections that send such
# bodies slowly would keep all others out.
_SMALL = 2**16

_HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}


def needed_role(method: str, path: str) -> Role | None:
    """The role that a key needs for a request, None if no key is needed."""
    if collection := _COLLECTION.match(path):
        path = path[collection.end() :]
    if _OPEN.fullmatch(path):
        return None
    if method in _READ_METHODS or _READING.fullmatch(path):
        return "read"
    # Not path == "/v1/images": routes also match a path with a newline at its end.
    deletes_many = method == "DELETE" and not path.startswith("/v1/images/")
    return "admin" if deletes_many or path.startswith("/v1/collections") else "write"


class RateLimit:
    """A token bucket for each key: holds `burst` requests, refilled at `per_minute`."""

    def __init__(self, per_minute: int, burst: int) -> None:
        self.per_second = per_minute / 60
        self.burst = burst
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait(self, name: str, now: float) -> float:
        """Seconds until `name` may make a request; 0 if it may make one now, which is then counted."""
        tokens, before = self._buckets.get(name, (self.burst, now))
        tokens = min(self.burst, tokens + (now - before) * self.per_second)
        allowed = tokens >= 1
        self._buckets[name] = tokens - allowed, now
        return 0 if allowed else (1 - tokens) / self.per_second


class RequestLimits:
    """Refuses requests before their bodies are read: unauthorized, too large, too many, or from a page of another site.

    Also answers HEAD like GET, and adds the headers common to all answers. It reads these settings:

    - `hosts`: accepted names in the Host header; empty: all. A page of another site whose name was made to resolve
      to this service (DNS rebinding) still sends its own name. IP addresses, as Prometheus sends them, and probes pass.
    - `keys`, `rate_limit`, `rate_burst`: who may do what, and how often. The key is then `request.state.key`.
    - `allowed_origins`: other sites whose pages may send changes and searches.
    - `max_upload_bytes`: limit of a form. Any other body may have at most `MAX_JSON` bytes as well.
    - `max_uploads`: how many requests with a body, or that change something, may be in progress. One with a small body
      is in progress once the body has arrived.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.max_bytes = settings.max_upload_bytes
        self.max_changing = settings.max_uploads
        self.hosts = settings.hosts()
        self.origins = settings.allowed_origins or ()
        self.keys = KeyFile(settings.keys) if settings.keys else None
        self.rate = RateLimit(settings.rate_limit, settings.rate_burst) if settings.rate_limit else None
        self._in_progress = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401, 403, 411, 413, 415, 421, 429 or 503."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, is_head = Headers(scope=scope), scope["method"] == "HEAD"
        changing = scope["method"] not in _READ_METHODS

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered.update(_HEADERS)
                answered.setdefault("Cache-Control", "no-cache")  # scripts of two versions must not be mixed
                if "location" in answered:  # behind a proxy, Starlette would name the wrong scheme
                    answered["location"] = re.sub("^https?://[^/]*", "", answered["location"])
            await send(message)

        refusal = self._wrong_host(scope, headers) or self._no_right(scope) or self._too_often(scope)
        if refusal is None and changing:
            refusal = self._foreign_page(headers) or self._wrong_body(headers)
            if refusal is None and int(headers.get("content-length", 0)) <= _SMALL:
                receive = await _read_ahead(receive)
            refusal = refusal or self._too_many()
        if refusal is not None:
            await refusal(scope, receive, answer)
            return
        # HEAD is the same as GET, without the body, which uvicorn leaves out; FastAPI's routes know only GET.
        inner = {**scope, "method": "GET"} if is_head else scope
        self._in_progress += changing
        try:
            await self.app(inner, receive, answer)
        finally:
            self._in_progress -= changing
            if "route" in inner:  # for the metrics
                scope["route"] = inner["route"]

    def _wrong_host(self, scope: Scope, headers: Headers) -> Response | None:
        name = _host_name(headers.get("host", ""))
        is_probe = scope["path"].startswith("/healthz/")  # by a proxy, under the name of a container
        if not self.hosts or name in self.hosts or _is_address(name) or is_probe:
            return None
        detail = f"the host {name[:80]!r} is not served: start the service with --allowed-host NAME to allow it"
        return problem(HTTPStatus.MISDIRECTED_REQUEST, detail, kind="urn:hashseek:WrongHost")

    def _no_right(self, scope: Scope) -> Response | None:
        role = needed_role(scope["method"], scope["path"])
        if self.keys is None or role is None:
            return None
        secret = secret_of(HTTPConnection(scope))
        key = self.keys.find(secret) if secret else None
        if key is None:
            detail = (
                "the key is unknown or was revoked" if secret else "a key is required: send Authorization: Bearer KEY"
            )
            challenge = {"WWW-Authenticate": "Bearer"}
            return problem(HTTPStatus.UNAUTHORIZED, detail, kind="urn:hashseek:KeyNeeded", headers=challenge)
        scope.setdefault("state", {})["key"] = key
        if not key.may(role):
            detail = f"the key {key.name!r} has the role {key.role}, but this request needs the role {role}"
            return problem(HTTPStatus.FORBIDDEN, detail, kind="urn:hashseek:RoleNeeded")
        return None

    def _too_often(self, scope: Scope) -> Response | None:
        key: Key | None = scope.get("state", {}).get("key")  # None if the request needs none
        if self.rate is None or key is None or not (wait := self.rate.wait(key.name, time.monotonic())):
            return None
        limit = round(60 * self.rate.per_second)
        detail = f"the key {key.name!r} may make {limit} requests per minute: try again in {wait:.1f} s"
        after = {"Retry-After": str(int(wait) + 1)}
        return problem(HTTPStatus.TOO_MANY_REQUESTS, detail, kind="urn:hashseek:TooOften", headers=after)

    def _foreign_page(self, headers: Headers) -> Response | None:
        """Refuse requests from pages of other sites. Only browsers name the page that sends a request."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        same = origin is None or origin.partition("://")[2] == headers.get("host")
        if (same and site in ("none", "same-origin")) or origin in self.origins:
            return None
        detail = "a page of another site may not change or search this collection"
        return problem(HTTPStatus.FORBIDDEN, detail, kind="urn:hashseek:ForeignPage")

    def _wrong_body(self, headers: Headers) -> Response | None:
        if (encoding := headers.get("content-encoding", "identity")) != "identity":
            detail = f"the body has the Content-Encoding {encoding[:40]!r}: send it uncompressed"
            return problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail)
        length = headers.get("content-length")
        if length is None:
            if "transfer-encoding" not in headers:
                return None
            return problem(HTTPStatus.LENGTH_REQUIRED, "send the upload with a Content-Length")
        is_form = headers.get("content-type", "").lower().startswith("multipart/form-data")
        limit = self.max_bytes if is_form else min(self.max_bytes, MAX_JSON)
        if int(length) > limit:
            also = "" if is_form else f", or {self.max_bytes:,} for an upload as multipart/form-data"
            detail = f"the request body has {int(length):,} bytes; the limit is {limit:,}{also}"
            return problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, kind="urn:hashseek:TooLarge")
        return None

    def _too_many(self) -> Response | None:
        if self._in_progress < self.max_changing:
            return None
        detail = f"{self.max_changing} uploads, searches and changes are already in progress: try again in a second"
        return problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, kind="urn:hashseek:Overloaded")


async def _read_ahead(receive: Receive) -> Receive:
    """`receive` after all messages of the body have arrived, or the client has left."""
    messages = [await receive()]
    while messages[-1].get("more_body"):
        messages.append(await receive())

    async def again() -> Message:
        return messages.pop(0) if messages else await receive()

    return again


def secret_of(request: HTTPConnection) -> str | None:
    """The key sent with a request: in the header `Authorization: Bearer KEY`, or in the cookie of the search page."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else request.cookies.get(COOKIE)


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """The name or IP address in a Host header, without the port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower()
