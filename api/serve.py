"""Subcommand `serve`. Imports torch and the web framework only after everything that can be refused was checked."""

import signal
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from hashseek.api.settings import Settings
from hashseek.indexing.catalog import Catalog
from hashseek.indexing.cli.options import EngineName
from hashseek.retrieval.errors import BadConfig


def serve(
    collection: Annotated[Path, typer.Argument(help="Folder of the collection.", envvar="HASHSEEK_COLLECTION")],
    host: Annotated[str | None, typer.Option(help="Host name or IP address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 0 for any free one; default 8000.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Another copy of the collection's checkpoint; default: its own.")
    ] = None,
    read_only: Annotated[
        bool | None, typer.Option("--read-only", help="Refuse to add and remove images; default: allow.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N; default auto.")] = None,
    precision: Annotated[
        Literal["auto", "fp32", "bf16"] | None, typer.Option(help="Precision of the network; default auto.")
    ] = None,
    engine: Annotated[EngineName | None, typer.Option(help="Library that runs the network; default torch.")] = None,
) -> None:
    """Serve a collection over HTTP, with a search page at / and the API documentation at /docs.

    Settings without an option come from the environment (HASHSEEK_HOST, HASHSEEK_PORT, HASHSEEK_READ_ONLY,
    HASHSEEK_MAX_UPLOAD_BYTES, ...). docs/reference/http-api.md lists them all.
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
    """Serve until stopped. What can be refused is refused before the server starts."""
    with closing(Catalog(settings.collection / "catalog.sqlite", read_only=settings.read_only)) as catalog:
        listener = _listen(settings.host, settings.port)
        import uvicorn

        from hashseek.api.app import create_app
        from hashseek.indexing.collection import check_checkpoint
        from hashseek.retrieval.engines import check_engine

        check_engine(settings.engine, device=settings.device, precision=settings.precision)
        check_checkpoint(catalog, settings.checkpoint or settings.collection / catalog.space.checkpoint)
    port = listener.getsockname()[1]
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    typer.echo(f"search page on http://{shown}:{port}, API on http://{shown}:{port}/docs (Ctrl-C stops)", err=True)
    # Being stopped is not a failure. Uvicorn raises the signal again after an orderly shutdown.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_level="warning", timeout_graceful_shutdown=10))
    server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With the protocol named, asyncio sets TCP_NODELAY on the connections.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        raise BadConfig(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with --port or --host"
        ) from None
    return listener
