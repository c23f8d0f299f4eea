"""Connections to the service: slow or excess ones are closed."""

import asyncio
import resource
from collections import deque
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEADER_SECONDS = 10.0  # until the headers of a request have arrived, from its first byte or the start of the connection
BODY_SECONDS = 120.0  # until its body has arrived
IDLE_SECONDS = 10.0  # until more of its body arrives
MAX_HEADERS = 2**18  # bytes of the headers of a request; the parser keeps them all. One read may return as many
_FILES = 65_536


class Connection(HttpToolsProtocol):
    """A connection with deadlines and a limit on headers; uvicorn only has a deadline between two requests."""

    max_connections = 1000
    _header_bytes: int | None = 0  # received so far; None while a body arrives
    _deadline: asyncio.TimerHandle | None = None
    _body_end = 0.0  # when the body must have arrived

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unanswered: deque[RequestResponseCycle] = deque()  # the request in progress and those sent after it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection at once if too many are open."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        self._expect(HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Close the connection if the headers of a request are too long."""
        super().data_received(data)
        if self._header_bytes is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADERS:
                self.transport.abort()

    def on_message_begin(self) -> None:
        """Called when a request begins."""
        super().on_message_begin()
        self._header_bytes = 0
        self._expect(HEADER_SECONDS)

    def on_headers_complete(self) -> None:
        """Called when its headers have arrived."""
        super().on_headers_complete()
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        self._unanswered.append(self.cycle)
        self._header_bytes = None
        self._body_end = self.loop.time() + BODY_SECONDS
        self._expect_body()

    def on_body(self, body: bytes) -> None:
        """Called when more of its body has arrived."""
        super().on_body(body)
        self._expect_body()

    def on_message_complete(self) -> None:
        """Called when it has arrived completely."""
        super().on_message_complete()
        self._expect(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is closed."""
        self._expect(None)
        for request in self._unanswered:  # uvicorn knows the last one only, and the others would write to nobody
            request.disconnected = True
        super().connection_lost(exc)

    def _expect_body(self) -> None:
        self._expect(min(IDLE_SECONDS, self._body_end - self.loop.time()))

    def _expect(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        if self.flow.read_paused and self.loop.time() < self._body_end:  # the service is slow, not the client
            self._expect_body()
        else:
            self.transport.abort()


def limit_connections() -> type[Connection]:
    """The connection class; it allows nearly as many connections as this process may open files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_files, most = (_FILES if limit == resource.RLIM_INFINITY else min(limit, _FILES) for limit in limits)
    if n_files < most:
        with suppress(OSError, ValueError):  # macOS allows fewer than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
            n_files = most
    Connection.max_connections = max(n_files - 500, n_files // 2)
    return Connection
