"""Subcommand `serve`. Imports torch and the web framework only after everything that can be refused was checked."""

import ctypes
import json
import os
import signal
import socket
import sys
import warnings
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from hashseek.api.settings import Settings
from hashseek.indexing.catalog import Catalog
from hashseek.indexing.cli.options import EngineName, PrecisionName, encoder_options
from hashseek.retrieval.errors import BadConfig


def serve(
    collection: Annotated[Path, typer.Argument(help="Folder of the collection.", envvar="HASHSEEK_COLLECTION")],
    host: Annotated[
        str, typer.Option(help="Host name or IP address to listen on.", envvar="HASHSEEK_HOST")
    ] = Settings.host,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on, 0 for any free one.", envvar="HASHSEEK_PORT")
    ] = Settings.port,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Another copy of the collection's checkpoint; default: its own.", envvar="HASHSEEK_CHECKPOINT"
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Refuse to add and remove images.", envvar="HASHSEEK_READ_ONLY")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", envvar="HASHSEEK_DEVICE")] = Settings.device,
    precision: Annotated[PrecisionName, typer.Option(help="Of the network.", envvar="HASHSEEK_PRECISION")] = "auto",
    engine: Annotated[
        EngineName, typer.Option(help="Library that runs the network; auto: as HASHSEEK_ENGINE says.")
    ] = "auto",
    max_upload_bytes: Annotated[
        int, typer.Option(min=1, help="Largest upload.", envvar="HASHSEEK_MAX_UPLOAD_BYTES")
    ] = Settings.max_upload_bytes,
    max_k: Annotated[
        int, typer.Option(min=1, help="Largest number of results of a search.", envvar="HASHSEEK_MAX_K")
    ] = Settings.max_k,
    max_uploads: Annotated[
        int,
        typer.Option(min=1, help="Uploads and changes at the same time; more get 503.", envvar="HASHSEEK_MAX_UPLOADS"),
    ] = Settings.max_uploads,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name that clients use, several times if there are several; others get 421. Default: any name, "
            "but only this machine's own names where --host is one of them.",
            envvar="HASHSEEK_ALLOWED_HOSTS",
        ),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Of the lines on standard error.", envvar="HASHSEEK_LOG_FORMAT")
    ] = "text",
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log every request.", envvar="HASHSEEK_ACCESS_LOG")
    ] = False,
) -> None:
    """Serve a collection over HTTP, with a search page at / and the API documentation at /docs.

    Each option can also be given as an environment variable.
    """
    encoder_options(device, precision, engine)  # refuses an unknown device
    run(
        Settings(
            collection=collection,
            checkpoint=checkpoint,
            host=host,
            port=port,
            read_only=read_only,
            device=device,
            precision=precision,
            engine=engine,
            max_upload_bytes=max_upload_bytes,
            max_k=max_k,
            max_uploads=max_uploads,
            allowed_hosts=tuple(allowed_host or ()),
            log_format=log_format,
            access_log=access_log,
        )
    )


def run(settings: Settings) -> None:
    """Serve until stopped. What can be refused is refused before the server starts."""
    files = settings.collection, settings.collection / "catalog.sqlite"
    if not settings.read_only and all(map(Path.exists, files)) and not all(os.access(file, os.W_OK) for file in files):
        _say(f"{settings.collection} may not be written by this user: it is served read-only", settings)
        settings = replace(settings, read_only=True)
    with closing(Catalog(settings.collection / "catalog.sqlite", read_only=settings.read_only)) as catalog:
        listener = _listen(settings.host, settings.port)
        import uvicorn
        from pydantic.warnings import UnsupportedFieldAttributeWarning

        # FastAPI hides this warning of its own, but not while another thread changes the filters, as torch does.
        warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)
        from hashseek.api import logs
        from hashseek.api.app import create_app
        from hashseek.api.connections import limit_connections
        from hashseek.indexing.collection import check_checkpoint
        from hashseek.retrieval.engines import check_engine

        check_engine(settings.engine, device=settings.device, precision=settings.precision)
        check_checkpoint(catalog, settings.checkpoint or settings.collection / catalog.space.checkpoint)
    _give_memory_back()
    port = listener.getsockname()[1]
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    _say(f"search page on http://{shown}:{port}, API on http://{shown}:{port}/docs (Ctrl-C stops)", settings)
    # Being stopped is not a failure. Uvicorn raises the signal again after an orderly shutdown.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    logs.configure(as_json=settings.log_format == "json", access_log=settings.access_log)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings),
            http=limit_connections(),
            ws="none",
            log_config=None,
            log_level="error",  # its warnings are about malformed requests, which anybody may send
            access_log=False,
            timeout_keep_alive=15,  # s; longer than clients keep idle connections, httpx for 5 s, say
            timeout_graceful_shutdown=10,
        )
    )
    server.run(sockets=[listener])


def _say(message: str, settings: Settings) -> None:
    line = json.dumps({"level": "info", "message": message}) if settings.log_format == "json" else message
    typer.echo(line, err=True)


def _give_memory_back() -> None:
    """Make glibc return the memory of decoded images at once. By default it keeps blocks of up to 32 MB for reuse."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(ctypes.c_int(-3), ctypes.c_int(2**20))  # M_MMAP_THRESHOLD


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
