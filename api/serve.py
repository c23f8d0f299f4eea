"""Subcommand `serve`."""

import signal
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import uvicorn
from pydantic import ValidationError

from hashseek.api.app import create_app
from hashseek.api.settings import Settings
from hashseek.indexing.catalog import Catalog
from hashseek.indexing.cli.options import EngineName
from hashseek.indexing.collection import CATALOG, check_checkpoint
from hashseek.retrieval.engines import check_engine
from hashseek.retrieval.errors import BadConfig


def serve(
    collection: Annotated[Path, typer.Argument(help="Folder of the collection.", envvar="HASHSEEK_COLLECTION")],
    host: Annotated[str | None, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 0 for any; default 8000.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Another file of the collection's checkpoint.")] = None,
    read_only: Annotated[
        bool | None, typer.Option("--read-only", help="Refuse to add and remove; default: allow.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N; default auto.")] = None,
    precision: Annotated[
        Literal["auto", "fp32", "bf16"] | None, typer.Option(help="Of the network; default auto.")
    ] = None,
    engine: Annotated[EngineName | None, typer.Option(help="What computes the network; default torch.")] = None,
) -> None:
    """Serve a collection over HTTP, with a search page at / and the API at /docs.

    Settings that are not given are taken from the environment (HASHSEEK_HOST, HASHSEEK_PORT, HASHSEEK_READ_ONLY,
    HASHSEEK_MAX_UPLOAD_BYTES, ...); docs/reference/http-api.md lists them all.
    """
    given: dict[str, Any] = {
        "collection": collection,
        "host": host,
        "port": port,
        "checkpoint": checkpoint,
        "read_only": read_only,
        "device": device,
        "precision": precision,
        "engine": engine,
    }
    try:
        settings = Settings(**{key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise BadConfig(f"the setting {name} is {first['input']!r}: {first['msg']}") from None
    run(settings)


def run(settings: Settings) -> None:
    """Serve until told to stop; what can be checked is checked before the port is opened."""
    check_engine(settings.engine, device=settings.device, precision=settings.precision)
    with closing(Catalog(settings.collection / CATALOG, read_only=settings.read_only)) as catalog:
        check_checkpoint(catalog, settings.checkpoint or settings.collection / catalog.space.checkpoint)
    listener = _listen(settings.host, settings.port)
    port = listener.getsockname()[1]
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    typer.echo(f"search page on http://{shown}:{port}, API on http://{shown}:{port}/docs (Ctrl-C ends)", err=True)
    # Being told to stop is no failure. Uvicorn repeats the signal after it has shut down in order.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_level="warning", timeout_graceful_shutdown=10))
    server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        raise BadConfig(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with --port or --host"
        ) from None
    return listener
