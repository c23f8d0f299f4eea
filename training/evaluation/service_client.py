"""A client of a running service, for evaluation: what it stores, and what it returns for an image."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import read_bytes

_SECONDS = 120  # to wait for a response
_PAGE = 1000  # stored images in one response, the most that a service returns
_T = TypeVar("_T")


class ServiceRefused(BadConfig):
    """The service answered with an error."""


@dataclass(frozen=True)
class ServiceStats:
    """What the service reports about itself; old versions report no engine."""

    fingerprint: str
    version: str = ""
    engine: str = ""


@dataclass(frozen=True)
class StoredImage:
    """An image that the service stores."""

    id: int
    sha256: str
    path: str


@dataclass(frozen=True)
class _ImagePage:
    images: list[StoredImage]
    next: int | None


@dataclass(frozen=True)
class ServiceHit:
    """A search result."""

    id: int
    distance: int


@dataclass(frozen=True)
class SearchResponse:
    """The results for one image, nearest first."""

    fingerprint: str
    hits: list[ServiceHit]


class ServiceClient:
    """The service at a URL. The environment variable HASHSEEK_API_KEY is the key for a service that wants one.

    Every method raises `ServiceRefused` if the service answers with an error, and `BadConfig` if no Hashseek service
    answers at the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        key = os.environ.get("HASHSEEK_API_KEY")
        self._client = httpx.Client(timeout=_SECONDS, headers={"Authorization": f"Bearer {key}"} if key else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def stats(self) -> ServiceStats:
        """What the service reports about itself."""
        return self._request("GET", "/v1/stats", ServiceStats)

    def images(self) -> list[StoredImage]:
        """All stored images, by ascending id."""
        stored: list[StoredImage] = []
        after: int | None = 0
        while after is not None:
            page = self._request("GET", f"/v1/images?limit={_PAGE}&after={after}", _ImagePage)
            stored += page.images
            after = page.next
        return sorted(stored, key=lambda image: image.id)

    def search(self, path: Path, k: int) -> SearchResponse:
        """The k nearest images, by Hamming distance, of the one at `path`, which is sent unchanged."""
        image = ("query", read_bytes(path), "application/octet-stream")
        return self._request(
            "POST", "/v1/search", SearchResponse, data={"k": str(k), "rank": "hamming"}, files={"image": image}
        )

    def _request(self, method: str, path: str, kind: type[_T], **content: Any) -> _T:
        try:
            response = self._client.request(method, f"{self.url}{path}", **content)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BadConfig(f"no service answers at {self.url} ({error}): start one with `hashseek serve`") from None
        if not response.is_success:
            raise ServiceRefused(f"the service refused {method} {self.url}{path}: {_detail(response)}")
        try:
            return TypeAdapter(kind).validate_json(response.content)
        except ValidationError:
            raise BadConfig(f"{self.url} is not a Hashseek service of this version: correct --url") from None


def _detail(response: httpx.Response) -> str:
    """The `detail` of a problem JSON, or the status."""
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason_phrase}"
