"""Web servers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """Answers requests and logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


class _Files(QuietHandler, SimpleHTTPRequestHandler):
    pass


@contextmanager
def answering(handler: Callable[..., Any], kind: type[HTTPServer] = ThreadingHTTPServer) -> Iterator[HTTPServer]:
    """A server on a free port of this machine."""
    with kind(("127.0.0.1", 0), handler) as running:
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield running
        finally:  # or a test that fails would never end
            running.shutdown()
            thread.join()


def url_of(server: HTTPServer) -> str:
    """The URL of a server."""
    return f"http://127.0.0.1:{server.server_port}"


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL under which the files of a folder are served from this machine."""
    with answering(partial(_Files, directory=str(folder))) as server:
        yield url_of(server)
