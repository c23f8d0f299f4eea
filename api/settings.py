"""Settings of the service. Each is an option of `hashseek serve`, an environment variable and a name in a TOML file."""

import inspect
import re
import socket
import tomllib
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

import typer

from hashseek.api.keys import read_keys
from hashseek.indexing.cli.options import STORE_HELP
from hashseek.retrieval.devices import EngineName, PrecisionName
from hashseek.retrieval.errors import BadConfig

CATALOG = "catalog.sqlite"  # of a collection


@dataclass(frozen=True)
class Settings:
    """Settings and limits of the service; docs/reference/http-api.md lists them."""

    collection: Annotated[Path, typer.Argument(help=f"{STORE_HELP} Or a folder with several collections.")]
    host: Annotated[str, typer.Option(help="Host name or IP address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on, 0 for any free one.")] = 8000
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Another copy of the collection's checkpoint; default: its own. Required in Milvus, which stores none."
        ),
    ] = None
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse to add, change or remove images.")] = False
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    precision: Annotated[PrecisionName, typer.Option(help="Precision of the network.")] = "auto"
    engine: Annotated[EngineName, typer.Option(help="Library that runs the network.")] = "auto"
    max_upload_bytes: Annotated[int, typer.Option(min=1, help="Largest upload, in bytes.")] = 32 * 2**20
    max_k: Annotated[int, typer.Option(min=1, help="Largest number of results of a search.")] = 10_000
    max_uploads: Annotated[
        int, typer.Option(min=1, help="Largest number of concurrent requests other than GET; more get 503.")
    ] = 32
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            help="Host name that clients use; may be repeated; other names get 421. Default: any name, or only "
            "localhost and --host if that is a loopback address.",
        ),
    ] = None
    keys: Annotated[
        Path | None, typer.Option(help="File of API keys (`hashseek keys create`). Every request then needs one.")
    ] = None
    no_keys: Annotated[
        bool,
        typer.Option(
            "--no-keys",
            help="Require no keys: everyone who can reach --host may change the collection. For use behind a proxy "
            "that authenticates.",
        ),
    ] = False
    rate_limit: Annotated[
        int | None, typer.Option(min=1, help="Requests per minute for each key; more get 429. Default: no limit.")
    ] = None
    rate_burst: Annotated[
        int, typer.Option(min=1, help="Requests that a key may make in a burst before --rate-limit applies.")
    ] = 200
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin", help="Site whose pages may use the API from a browser, such as https://my.example."
        ),
    ] = None
    url_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--url-host",
            help="Public HOST or HOST:PORT whose pictures clients may search with by URL; may be repeated.",
        ),
    ] = None
    allow_private: Annotated[
        bool,
        typer.Option(
            "--allow-private", help="Also show stored pictures whose URL is on this machine or in a private network."
        ),
    ] = False
    reports: Annotated[
        Path | None,
        typer.Option(help="Folder with reports of evaluations and training runs, to be listed at /v1/reports."),
    ] = None
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Format of lines on standard error.")] = "text"
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False

    def folders(self) -> dict[str, Path]:
        """Folders of the collections by name. A single collection has the name ""."""
        several = {} if (self.collection / CATALOG).exists() else self.subfolders()
        return several or {"": self.collection}

    def subfolders(self) -> dict[str, Path]:
        """Subfolders with a collection by name, except hidden ones and those with unprintable names.

        Raises:
            OSError: they cannot be listed.
        """
        # Not by a single `glob`, which takes a folder that cannot be listed for an empty one.
        entries = sorted(self.collection.iterdir()) if self.collection.is_dir() else []
        folders = [folder for folder in entries if folder.name[0] != "." and any(folder.glob(CATALOG))]
        return {folder.name: folder for folder in folders if folder.name.isprintable()}  # False if it is not UTF-8

    def hosts(self) -> frozenset[str]:
        """Names accepted in the Host header, besides IP addresses; empty: all.

        A service for this machine alone accepts the machine's own names; any other may be reached under any name.
        """
        allowed = frozenset(name.lower() for name in self.allowed_hosts or ())
        return allowed | {"localhost", self.host.lower()} if allowed or _is_loopback(self.host) else frozenset()

    def check(self) -> None:
        """Refuse settings that would let strangers change the collection, or that contradict each other.

        Raises:
            BadConfig: they do.
        """
        if self.keys is not None and self.no_keys:
            raise BadConfig("--keys and --no-keys cannot be used together: leave one out")
        if self.keys is not None:
            read_keys(self.keys)
        elif self.rate_limit is not None:
            raise BadConfig("--rate-limit limits the requests of each key: add --keys FILE")
        elif not self.read_only and not self.no_keys and not _is_loopback(self.host):
            raise BadConfig(
                f"everyone who can reach {self.host} could change the collection: add --keys FILE (created with "
                "`hashseek keys create`), --read-only, or --no-keys if a proxy authenticates the users"
            )
        if self.rate_limit is None and self.rate_burst != Settings.rate_burst:
            raise BadConfig("--rate-burst needs --rate-limit: add that, or leave out --rate-burst")
        if self.reports is not None and not self.reports.is_dir():
            raise BadConfig(f"there is no reports folder {self.reports}: create it, or correct --reports")
        for option, values, pattern, examples in (
            ("--allowed-host", self.allowed_hosts, r"[\w.-]+|[0-9a-fA-F:]+", "images.example, without scheme and port"),
            ("--url-host", self.url_hosts, r"[\w.-]+(:\d{1,5})?", "images.example or images.example:8080"),
            ("--allowed-origin", self.allowed_origins, r"https?://[^/*]+", "https://my.example, without a path"),
        ):
            for value in values or ():
                if re.fullmatch(pattern, value, re.ASCII) is None:
                    raise BadConfig(f"{value!r} is not valid for {option}: write it like {examples}")

    def as_toml(self) -> str:
        """The settings as a file for `--config`, with comments for those that are not set. None of them is a secret."""
        import tomli_w

        values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        unset = "".join(f"# {name} is not set\n" for name, value in values.items() if value is None)
        return tomli_w.dumps({name: value for name, value in values.items() if value is not None}) + unset


def _is_loopback(host: str) -> bool:
    """Whether a service on `host` can be reached only from this machine; an unknown name is refused later."""
    try:
        return all(ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return True


def options() -> list[inspect.Parameter]:
    """The settings as parameters of a command; `max_k` can also be given as HASHSEEK_MAX_K, and so on."""
    parameters = list(inspect.signature(Settings).parameters.values())
    for parameter in parameters:
        parameter.annotation.__metadata__[0].envvar = f"HASHSEEK_{parameter.name.upper()}"
    return parameters


def read_config(context: typer.Context, file: Path | None) -> None:
    """Make the settings in a TOML file the defaults of the command; options and environment variables take precedence.

    Raises:
        BadConfig: it cannot be read, or contains something else.
    """
    if file is None:
        return
    from pydantic import TypeAdapter, ValidationError

    types = {parameter.name: parameter.annotation for parameter in options()}
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        for name, value in values.items():
            if name not in types:
                raise BadConfig(f"{file}: there is no setting {name!r}: choose from {', '.join(types)}")
            TypeAdapter(types[name]).validate_python(value)
    except ValidationError as error:
        raise BadConfig(f"{file}: {name} is {value!r}: {error.errors()[0]['msg']}") from None
    except OSError as error:
        raise BadConfig(f"{file} cannot be read: {error.strerror or error}: correct --config") from None
    except ValueError as error:
        raise BadConfig(f"{file} cannot be read as TOML: {error}") from None
    context.default_map = values
