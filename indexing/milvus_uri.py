"""URIs of collections in Milvus: `milvus://host:19530/name?index=ivf&consistency=bounded`."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from hashseek.retrieval.errors import BadConfig

_SYNTAX = (
    "write milvus://HOST:19530/NAME, optionally with ?index=flat or ivf, &consistency=strong or bounded, and &tls=on"
)
_OPTIONS = {"index": ("flat", "ivf"), "consistency": ("strong", "bounded"), "tls": ("on", "off")}


@dataclass(frozen=True)
class MilvusUri:
    """Where a collection is in Milvus.

    Args:
        host: name or IPv4 address of the server; pymilvus cannot connect to an IPv6 address.
        port: the port that it listens on.
        name: name of the collection in Milvus.
        index: "flat" compares every code, "ivf" is approximate; None: that of the collection, "flat" for a new one.
        consistency: "strong" reads see everything that was written before; "bounded" ones are faster, and may lack
            what was written in the last seconds.
        tls: "on" encrypts the connection.
    """

    host: str
    port: int
    name: str
    index: str | None = None
    consistency: str = "strong"
    tls: str = "off"

    @property
    def server(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"milvus://{self.server}/{self.name}"


def is_in_milvus(place: str | Path) -> bool:
    """Whether a place is a Milvus URI rather than a folder."""
    return str(place).startswith("milvus:/")  # a Path has one slash of the two


def parse_uri(place: str | Path) -> MilvusUri:
    """The parts of a URI.

    Raises:
        BadConfig: it is not one.
    """
    text = re.sub("^milvus:/+", "milvus://", str(place))
    try:
        parts = urlsplit(text)
        port = parts.port or 19530
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise BadConfig(f"{text!r} is not a Milvus URI ({error}): {_SYNTAX}") from None
    if not parts.hostname or "@" in parts.netloc or not re.fullmatch(r"[A-Za-z_]\w{0,254}", parts.path[1:], re.ASCII):
        raise BadConfig(
            f"{text!r} is not a Milvus URI: {_SYNTAX}; NAME has letters, digits and underscores; set a user and "
            "password in HASHSEEK_MILVUS_TOKEN as USER:PASSWORD"
        )
    if ":" in parts.hostname:
        raise BadConfig(f"{text!r} has an IPv6 address, to which pymilvus cannot connect: use the name of the server")
    for name, value in options.items():
        if value not in _OPTIONS.get(name, ()):
            raise BadConfig(f"{text!r} has an unknown option {name}={value}: {_SYNTAX}")
    return MilvusUri(parts.hostname, port, parts.path[1:], **options)


def refuse_milvus(place: Path) -> None:
    """Refuse a collection in Milvus where only a folder will do.

    Raises:
        BadConfig: `place` is a Milvus URI.
    """
    if is_in_milvus(place):
        raise BadConfig(
            f"this needs a collection in a folder, but {parse_uri(place)} is in Milvus, which supports only add, "
            "import, search, remove, stats and serve: use Milvus's own backups, index builds and compaction"
        )


def without_uri(place: Path, text: str) -> str:
    """A text without the URI and its server, which clients of a service need not know."""
    uri = parse_uri(place)
    return text.replace(str(uri), uri.name).replace(f" at {uri.server}", "")
