"""What the service answers."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, computed_field

from hashseek.indexing.catalog import Change, StoredImage
from hashseek.indexing.searcher import Answer, Rank


def shown_path(path: str) -> str:
    """What clients see of a path: the name of a file outside the collection, since its folders are the server's own."""
    return path.rpartition("/")[2] if path.startswith("/") else path


class ImageSummary(BaseModel):
    """What a hit says of an image; `key` and `attributes` are the caller's own, `path` is a name or a URL."""

    id: int
    key: str | None
    path: Annotated[str, AfterValidator(shown_path)]
    labels: list[str]
    attributes: dict[str, Any]
    width: int
    height: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def url(self) -> str | None:
        """Where this service has the file; null for a vector, which has none."""
        return f"/v1/images/{self.id}/file" if self.path else None


class ImageRecord(ImageSummary):
    """A stored image."""

    bytes: int
    sha256: str
    media_type: str
    added_at: str
    changed_at: str

    @classmethod
    def of(cls, stored: StoredImage, **more: Any) -> Self:
        """The record of the catalog; `more` for fields that it does not have."""
        return cls(**vars(stored), **more)


class AddedImage(ImageRecord):
    """A stored image, and whether the request added it, updated it, or found it stored already ("known")."""

    created: bool
    change: Change


class ImagePage(BaseModel):
    """Some stored images; `next` is the `after` of the next page, if there is one."""

    images: list[ImageRecord]
    next: int | None


class HitRecord(ImageSummary):
    """A result: rank from 1, Hamming distance in bits, and the probability that an image at this distance is relevant.

    `relevance` is null where the collection has no calibration. `score` orders the hits, highest first; it is
    null where the distance does.
    """

    rank: int
    distance: int
    score: float | None
    relevance: float | None


class SearchAnswer(BaseModel):
    """The answer to a search: best first, ties by ascending id. `ranked_by` is what orders the hits."""

    n_bits: int
    n_images: int
    fingerprint: str
    encode_ms: float
    search_ms: float
    ranked_by: Rank
    hits: list[HitRecord]

    @classmethod
    def of(cls, answer: Answer, *, n_bits: int, n_images: int, fingerprint: str) -> Self:
        """The answer of the searcher, with what it says of the collection."""
        return cls(
            n_bits=n_bits,
            n_images=n_images,
            fingerprint=fingerprint,
            encode_ms=round(answer.encode_ms, 3),
            search_ms=round(answer.search_ms, 3),
            ranked_by=answer.rank,
            hits=[HitRecord(**{**vars(hit.image), **vars(hit)}) for hit in answer.hits],
        )


class Stats(BaseModel):
    """What the collection holds; `n_images` counts images or vectors."""

    holds: Literal["images", "vectors"]
    n_images: int
    n_bits: int
    fingerprint: str
    backbone: str
    engine: str
    labels: dict[str, int]
    engines: dict[str, int]
    read_only: bool
    keeps_features: bool
    version: str
    index: dict[str, Any]


class Session(BaseModel):
    """The name and role of the key in use. A service without keys lets everybody do everything: null and admin."""

    key: str | None
    role: Literal["read", "write", "admin"]


class Health(BaseModel):
    """Whether the service lives, or is ready to search."""

    status: str


class ProblemDetails(BaseModel):
    """An error (RFC 9457): `type` is for programs, `detail` for people."""

    type: str
    title: str
    status: int
    detail: str
