"""Metrics in the Prometheus format at /metrics; request ids and the access log."""

import logging
import time
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hashseek.api.monitoring.logs import ID_HEADER, make_id, request_id

access = logging.getLogger("hashseek.access")

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
REQUESTS = Counter("hashseek_requests", "Requests answered.", ("method", "route", "status"))
LATENCY = Histogram(
    "hashseek_request_seconds", "From a request's headers to the end of the response.", ("route",), buckets=_SECONDS
)
STAGES = Histogram(
    "hashseek_stage_seconds",
    "Parts of a search or an upload: wait (for memory and a processor core), decode, encode, search, records.",
    ("stage",),
    buckets=(0.0001, 0.0002, 0.0005, *_SECONDS),
)
BATCH = Histogram("hashseek_batch_images", "Images encoded together.", buckets=(1, 2, 4, 8, 16, 32, 64))
ERRORS = Counter("hashseek_errors", "Responses with problem JSON, by type.", ("type",))
IN_PROGRESS = Gauge("hashseek_requests_in_progress", "Requests in progress.")
QUEUE = Gauge("hashseek_queue_length", "Images waiting for memory or a processor core.")
INDEX_SIZE = Gauge("hashseek_index_images", "Images in the index.")

router = APIRouter(include_in_schema=False)


@router.get("/metrics")
def metrics() -> Response:
    """All metrics of this process."""
    return Response(generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def observe(name: str, value: float) -> None:
    """Record what a searcher observes."""
    (BATCH if name == "batch" else STAGES.labels(name)).observe(value)


class Observed:
    """Assigns an id to every request, counts and times it, and writes the access log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500
        own = make_id(Headers(scope=scope).get(ID_HEADER))
        request_id.set(own)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = own
            await send(message)

        IN_PROGRESS.inc()
        try:
            await self.app(scope, receive, answer)
        finally:
            IN_PROGRESS.dec()
            _note(scope, status, time.perf_counter() - started)


def _note(scope: Scope, status: int, seconds: float) -> None:
    route = getattr(scope.get("route"), "path", "other")
    method = scope["method"] if route != "other" else "other"  # clients may invent methods and paths
    REQUESTS.labels(method, route, status).inc()
    LATENCY.labels(route).observe(seconds)
    if access.isEnabledFor(logging.INFO):
        request: dict[str, Any] = {
            "client": (scope.get("client") or ("",))[0],
            "key": key.name if (key := scope.get("state", {}).get("key")) else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "milliseconds": round(1000 * seconds, 1),
        }
        text = "%(client)s %(key)s %(method)s %(path)r %(status)d, %(milliseconds)s ms"
        access.info(text, request | {"key": request["key"] or "-"}, extra={"request": request})
