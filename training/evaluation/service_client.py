"""A running service as evaluation needs it: what it holds, and what it answers to a picture."""

import json
import secrets
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import read_bytes

_SECONDS = 120  # to wait for one answer
_PAGE = 1000  # stored images in one answer, the most that a service gives
_T = TypeVar("_T")


class Refused(BadConfig):
    """The service answered that it will not."""


@dataclass(frozen=True)
class Stats:
    """What the service says of itself; older ones name no engine."""

    fingerprint: str
    version: str = ""
    engine: str = ""


@dataclass(frozen=True)
class Stored:
    """A stored image."""

    id: int
    sha256: str
    path: str


@dataclass(frozen=True)
class _Page:
    images: list[Stored]
    next: int | None


@dataclass(frozen=True)
class Hit:
    """A stored image that was found."""

    id: int
    distance: int


@dataclass(frozen=True)
class Hits:
    """The answer to one picture, nearest first."""

    fingerprint: str
    hits: list[Hit]


def ask_stats(url: str) -> Stats:
    """What the service at `url` says of itself.

    Raises:
        BadConfig: there is none, or it is not a Hashseek service.
    """
    return _ask(f"{url}/v1/stats", Stats)


def ask_stored(url: str) -> list[Stored]:
    """All stored images by ascending id. Raises as `ask_stats`."""
    stored: list[Stored] = []
    after: int | None = 0
    while after is not None:
        page = _ask(f"{url}/v1/images?limit={_PAGE}&after={after}", _Page)
        stored += page.images
        after = page.next
    return sorted(stored, key=lambda image: image.id)


def ask_similar(url: str, path: Path, k: int) -> Hits:
    """The k nearest of one picture, sent byte for byte. Raises as `ask_stats`, or `Refused`."""
    boundary = secrets.token_hex(16)
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="k"\r\n\r\n{k}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="query"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    body = head.encode() + read_bytes(path) + f"\r\n--{boundary}--\r\n".encode()
    kind = f"multipart/form-data; boundary={boundary}"
    return _ask(f"{url}/v1/search", Hits, body=body, headers={"Content-Type": kind}, name=path.name)


def _ask(
    url: str, kind: type[_T], *, body: bytes | None = None, headers: dict[str, str] | None = None, name: str = ""
) -> _T:
    """What a service answers, as `kind`; a POST where there is a body."""
    if not url.startswith(("http://", "https://")):
        raise BadConfig(
            f"--url is the address of a service, such as http://127.0.0.1:8000, not {url.partition('/v1/')[0]}"
        )
    try:
        request = urllib.request.Request(url, data=body, headers=headers or {})
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            content = response.read()
    except urllib.error.HTTPError as error:
        detail = _detail(error.read()) or f"{error.code} {error.reason}"
        raise Refused(f"the service refused {f'the query {name}' if name else url}: {detail}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise BadConfig(f"no service answers at {url} ({reason}): start it with `hashseek serve`") from None
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError:
        raise BadConfig(f"what answers at {url} is no Hashseek service of this version: correct --url") from None


def _detail(content: bytes) -> str:
    """The sentence of a problem JSON, or nothing."""
    try:
        found = json.loads(content)
    except ValueError:
        return ""
    return str(found.get("detail", "")) if isinstance(found, dict) else ""
