"""Connections of the service: those that are slow, or too many, are closed."""

import asyncio
import resource
from contextlib import suppress

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 10.0  # until the headers of a request have arrived, from its first byte or the start of the connection
BODY_SECONDS = 120.0  # until its body has arrived
MAX_HEADERS = 2**18  # bytes of the headers of a request; the parser keeps them all. One read may bring so many
_FILES = 65_536


class Connection(HttpToolsProtocol):
    """A connection with deadlines and a limit of headers; uvicorn has only a deadline between two requests."""

    max_connections = 1000
    _header_bytes: int | None = 0  # that have arrived; None while a body arrives
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection at once if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        self._expect(HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Close the connection if the headers of a request do not end."""
        super().data_received(data)
        if self._header_bytes is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADERS:
                self.transport.abort()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._header_bytes = 0
        self._expect(HEADER_SECONDS)

    def on_headers_complete(self) -> None:
        """Its headers have arrived."""
        super().on_headers_complete()
        self._header_bytes = None
        self._expect(BODY_SECONDS)

    def on_message_complete(self) -> None:
        """It has arrived."""
        super().on_message_complete()
        self._expect(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._expect(None)
        super().connection_lost(exc)

    def _expect(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self.transport.abort()


def limit_connections() -> type[Connection]:
    """The class of connections, of which there may be nearly as many as this process may open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    n_files = _FILES if soft == resource.RLIM_INFINITY else min(soft, _FILES)
    Connection.max_connections = max(n_files - 500, n_files // 2)
    return Connection
