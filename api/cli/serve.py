"""Subcommand `serve`. Imports torch and the web framework only after all settings have been checked."""

import inspect
import logging
import os
import signal
import socket
import sys
import warnings
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hashseek.api.settings import CATALOG, Settings, options, read_config
from hashseek.indexing.catalog import Catalog
from hashseek.indexing.cli.options import encoder_options
from hashseek.indexing.milvus_uri import is_in_milvus
from hashseek.retrieval.errors import BadConfig

if TYPE_CHECKING:  # it loads FAISS
    from hashseek.indexing.opening import Store


def serve(
    *,
    config: Annotated[  # noqa: ARG001
        Path | None,
        typer.Option(callback=read_config, is_eager=True, envvar="HASHSEEK_CONFIG", help="TOML file of settings."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings as a TOML file and exit.")
    ] = False,
    **values: Any,
) -> None:
    """Serve a collection over HTTP, with a search page at / and the API documentation at /docs.

    If the folder has collections in its subfolders, each is served at /collections/NAME.

    Each setting can also be given as an environment variable, or by its name in a TOML file. Options take precedence
    over variables, and variables over the file.
    """
    settings = Settings(**values)
    encoder_options(settings.device, settings.precision, settings.engine)  # refuses an unknown device
    if print_config:
        typer.echo(settings.as_toml(), nl=False)
    else:
        run(settings)


# Typer reads the options of a command from its signature.
_own = [own for own in inspect.signature(serve).parameters.values() if own.kind is own.KEYWORD_ONLY]
serve.__signature__ = inspect.Signature([*options(), *_own])  # type: ignore[attr-defined]


def run(settings: Settings) -> None:
    """Serve until stopped. Bad settings are refused before the server starts."""
    if not is_in_milvus(settings.collection):  # messages then name it in one way only, which clients must not see
        settings = replace(settings, collection=settings.collection.absolute())
    folders = settings.folders()
    settings.check()
    if "" not in folders and settings.checkpoint:
        raise BadConfig(f"--checkpoint is for a single collection, but {settings.collection} has several: leave it out")
    with ExitStack() as opened:
        # If there are several, a damaged one is reported when it is loaded, and the others are served.
        alone = _codes_of(settings, opened) if "" in folders else None
        listener = _listen(settings.host, settings.port)
        import uvicorn
        from pydantic.warnings import UnsupportedFieldAttributeWarning

        # FastAPI hides this warning itself, but not while another thread changes the filters, as torch does.
        warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)
        from hashseek.api.access.connections import limit_connections
        from hashseek.api.app import create_app
        from hashseek.api.decoding import give_memory_back
        from hashseek.api.monitoring import logs, tracing
        from hashseek.indexing.collection import check_checkpoint
        from hashseek.retrieval.engines import check_engine

        check_engine(settings.engine, device=settings.device, precision=settings.precision)
        if alone:
            check_checkpoint(*alone)
    app = create_app(settings)
    if any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        tracing.trace(app)
    give_memory_back()
    port = listener.getsockname()[1]
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    logs.configure(as_json=settings.log_format == "json", access_log=settings.access_log)
    url = f"http://{shown}:{port}"
    logging.getLogger("hashseek").info("search page on %s, API on %s/docs (press Ctrl-C to stop)", url, url)
    # Being stopped is not a failure. Uvicorn raises the signal again after an orderly shutdown.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=limit_connections(),
            ws="none",
            log_config=None,
            log_level="error",  # its warnings are about malformed requests, which anyone may send
            access_log=False,
            timeout_keep_alive=15,  # s; longer than clients keep idle connections (httpx: 5 s)
            timeout_graceful_shutdown=10,
        )
    )
    server.run(sockets=[listener])


def _codes_of(settings: Settings, stack: ExitStack) -> "tuple[Catalog | Store, Path]":
    """The collection without its index, and the file of its checkpoint."""
    if is_in_milvus(settings.collection):
        from hashseek.indexing.opening import open_store  # loads FAISS

        store = stack.enter_context(closing(open_store(settings.collection, checkpoint=settings.checkpoint)))
        return store, store.checkpoint
    opened = Catalog(settings.collection / CATALOG, read_only=True)
    catalog = stack.enter_context(closing(opened))
    return catalog, settings.checkpoint or catalog.checkpoint


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY on the connections only if the protocol is named.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise BadConfig(
            f"cannot listen on {host} port {port}: {reason}; choose another with --port or --host"
        ) from None
    return listener
