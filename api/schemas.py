"""What the service answers, one model per direction."""

from typing import Any, Self

from pydantic import BaseModel

from hashseek.indexing.catalog import Change, StoredImage
from hashseek.indexing.searcher import Answer


class Image(BaseModel):
    """A stored image; `key` and `attributes` are the caller's own."""

    id: int
    key: str | None
    path: str
    labels: list[str]
    attributes: dict[str, Any]
    width: int
    height: int
    bytes: int
    sha256: str
    media_type: str
    added_at: str
    changed_at: str
    url: str

    @classmethod
    def of(cls, stored: StoredImage) -> Self:
        """The record as it goes over the wire."""
        return cls(
            id=stored.id,
            key=stored.key,
            path=stored.path,
            labels=list(stored.labels),
            attributes=stored.attributes,
            width=stored.width,
            height=stored.height,
            bytes=stored.bytes,
            sha256=stored.sha256,
            media_type=stored.media_type,
            added_at=stored.added_at,
            changed_at=stored.changed_at,
            url=f"/v1/images/{stored.id}/file",
        )


class AddedImage(Image):
    """A stored image, and what this request did: it added it, updated the one with its key, or knew it already."""

    created: bool
    change: Change


class Page(BaseModel):
    """Some stored images; `next` is the `after` of the next page, if there is one."""

    images: list[Image]
    next: int | None


class Hit(BaseModel):
    """One result: rank from 1, Hamming distance in bits, and how likely an image so near is relevant.

    `relevance` is null in a collection without a calibration.
    """

    rank: int
    distance: int
    relevance: float | None
    id: int
    key: str | None
    path: str
    labels: list[str]
    attributes: dict[str, Any]
    width: int
    height: int
    url: str


class Hits(BaseModel):
    """The answer to a search, nearest first, equal distances by ascending id."""

    n_bits: int
    n_images: int
    fingerprint: str
    encode_ms: float
    search_ms: float
    hits: list[Hit]

    @classmethod
    def of(cls, answer: Answer, *, n_bits: int, n_images: int, fingerprint: str) -> Self:
        """An answer as it goes over the wire."""
        hits = [
            Hit(
                rank=hit.rank,
                distance=hit.distance,
                relevance=hit.relevance,
                id=hit.image.id,
                key=hit.image.key,
                path=hit.image.path,
                labels=list(hit.image.labels),
                attributes=hit.image.attributes,
                width=hit.image.width,
                height=hit.image.height,
                url=f"/v1/images/{hit.image.id}/file",
            )
            for hit in answer.hits
        ]
        return cls(
            n_bits=n_bits,
            n_images=n_images,
            fingerprint=fingerprint,
            encode_ms=round(answer.encode_ms, 3),
            search_ms=round(answer.search_ms, 3),
            hits=hits,
        )


class Stats(BaseModel):
    """What the collection holds."""

    n_images: int
    n_bits: int
    fingerprint: str
    backbone: str
    engine: str
    labels: dict[str, int]
    engines: dict[str, int]
    read_only: bool
    version: str
    index: dict[str, Any]


class Health(BaseModel):
    """Whether the service lives, or is ready to search."""

    status: str


class Problem(BaseModel):
    """An error (RFC 9457): `detail` is a sentence that says what to do."""

    type: str
    title: str
    status: int
    detail: str
