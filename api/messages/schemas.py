"""The answers of the service. The client uses the same models."""

from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

if TYPE_CHECKING:  # these load torch, which a client does not need
    from hashseek.indexing.catalog import StoredImage
    from hashseek.indexing.searcher import Hit


Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
NDJSON = "application/x-ndjson"  # of an answer with a line of JSON for each image
_FINGERPRINT = "9f2c" * 16  # of the examples
_SUMMARY: JsonDict = {
    "id": 12,
    "key": "shop/4711",
    "path": "cat.jpg",
    "labels": ["cat"],
    "attributes": {"year": 2015},
    "width": 640,
    "height": 480,
    "url": "/v1/images/12/file",
}
_RECORD: JsonDict = {
    **_SUMMARY,
    "bytes": 81_234,
    "sha256": "5e1d" * 16,
    "media_type": "image/jpeg",
    "added_at": "2026-01-31T12:00:00Z",
    "changed_at": "2026-01-31T12:00:00Z",
}
_ANSWER: JsonDict = {
    "n_bits": 48,
    "n_images": 25_000,
    "fingerprint": _FINGERPRINT,
    "encode_ms": 9.8,
    "search_ms": 1.2,
    "ranked_by": "asymmetric",
    "is_exact": True,
    "next_offset": 1,
    "histogram": None,
    "hits": [{**_SUMMARY, "rank": 1, "distance": 3, "score": 31.5, "relevance": 0.91}],
}
_CODE: JsonDict = {"code": "b1c47f3a0d22", "n_bits": 48, "fingerprint": _FINGERPRINT, "encode_ms": 9.8}
_PROBLEM: JsonDict = {
    "type": "urn:hashseek:UnknownImage",
    "title": "Not Found",
    "status": 404,
    "detail": "there is no image 99",
    "request_id": "1c2d3e4f5a6b7c8d",
}
url_prefix: ContextVar[str] = ContextVar("url_prefix", default="")  # of the answering collection: /collections/NAME


def url_of(image: "StoredImage") -> str | None:
    """The URL of an image's file at this service; None for a vector, which has none."""
    return f"{url_prefix.get()}/v1/images/{image.id}/file" if image.path else None


def schema_ref(model: type[BaseModel]) -> dict[str, str]:
    """The reference to a model in the OpenAPI document; generated clients have one class for it then."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def shown_path(path: str) -> str:
    """What clients see of a path: only the name of a file outside the collection, since its folders are private."""
    return path.rpartition("/")[2] if path.startswith("/") else path


class ImageSummary(BaseModel):
    """What a hit contains about an image; `key` and `attributes` are the caller's own, `path` is a name or a URL.

    `url` is the URL of the file at this service; null for a vector, which has none.
    """

    id: int
    key: str | None
    path: Annotated[str, AfterValidator(shown_path)]
    labels: list[str]
    attributes: dict[str, Any]
    width: int
    height: int
    url: str | None


class ImageRecord(ImageSummary):
    """A stored image."""

    model_config = ConfigDict(json_schema_extra={"examples": [_RECORD]})

    bytes: int
    sha256: str
    media_type: str
    added_at: Time
    changed_at: Time

    @classmethod
    def of(cls, stored: "StoredImage", **more: Any) -> Self:
        """The answer for a record of the catalog; `more` has fields that the record lacks."""
        return cls(**vars(stored), url=url_of(stored), **more)


class AddedImage(ImageRecord):
    """A stored image, and whether the request added it, updated it, or found that it was already stored ("known")."""

    model_config = ConfigDict(json_schema_extra={"examples": [{**_RECORD, "created": True, "change": "added"}]})

    created: bool
    change: Literal["added", "updated", "known"]


class Removed(BaseModel):
    """How many images were deleted."""

    removed: int


class ImagePage(BaseModel):
    """Some of the stored images that match the filters, `total` in all; `next` is the `after` of the next page."""

    images: list[ImageRecord]
    total: int
    next: int | None


class DuplicateGroup(BaseModel):
    """Images linked by steps of at most the radius: the first 100 by ascending id, `size` in all."""

    size: int
    images: list[ImageRecord]


class DuplicateGroups(BaseModel):
    """Some of the groups that were not kept, `total` in all; `next_offset` is the `offset` of the next ones."""

    groups: list[DuplicateGroup]
    total: int
    next_offset: int | None


class HitRecord(ImageSummary):
    """A result: rank from 1, Hamming distance in bits, and the probability that an image at this distance is relevant.

    `relevance` is null if the collection has no calibration. `score` orders the hits, highest first; it is
    null if they are ordered by distance.
    """

    rank: int
    distance: int
    score: float | None
    relevance: float | None


class SearchAnswer(BaseModel):
    """The answer to a search: best first, ties by ascending id. `ranked_by` is how the hits are ordered.

    `is_exact` is false where an approximate index or a lack of `oversample` may have missed a better one. `next_offset`
    is the `offset` of the next hits with the same k; null if fewer than k were found, or if the next ones would exceed
    the service's largest k. `histogram`: images at each distance; null unless it was asked for, or if the collection is
    in Milvus.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_ANSWER]})

    n_bits: int
    n_images: int
    fingerprint: str
    encode_ms: float
    search_ms: float
    ranked_by: Literal["hamming", "asymmetric", "float"]
    is_exact: bool
    next_offset: int | None
    histogram: list[int] | None
    hits: list[HitRecord]


class SearchAnswers(BaseModel):
    """The answers to several queries, in their order."""

    answers: list[SearchAnswer]


class Encoded(BaseModel):
    """A code in hex: bit j is bit j % 8 of byte j // 8. Only codes of the same fingerprint can be compared."""

    model_config = ConfigDict(json_schema_extra={"examples": [_CODE]})

    code: str
    n_bits: int
    fingerprint: str
    encode_ms: float


def hit_content(hit: "Hit") -> dict[str, Any]:
    """The content of a `HitRecord`."""
    image = hit.image
    return {
        "id": image.id,
        "key": image.key,
        "path": shown_path(image.path),
        "labels": image.labels,
        "attributes": image.attributes,
        "width": image.width,
        "height": image.height,
        "rank": hit.rank,
        "distance": hit.distance,
        "score": hit.score,
        "relevance": hit.relevance,
        "url": url_of(image),
    }


class Stats(BaseModel):
    """What the collection holds; `n_images` counts images or vectors. `max_k`: the largest k of a search.

    `expected_precision`: the expected share of relevant images within each radius from 0 to n_bits; null if the
    collection has no calibration.
    """

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
    max_k: int
    expected_precision: list[float] | None
    version: str
    index: dict[str, Any]


class LabelOverview(BaseModel):
    """A label: its images, and the mean distance in bits between two of them, and between one with and one without it.

    Distances are between the images on the map; null if there is no such pair.
    """

    label: str
    n_images: int
    within: float | None
    to_others: float | None


class MapPoint(BaseModel):
    """An image on the map of codes."""

    id: int
    x: float
    y: float
    labels: list[str]


class BitFigures(BaseModel):
    """The share of ones in each bit, constant bits, absolute correlations between bits, and distinct codes."""

    balance: list[float]
    n_constant: int
    mean_correlation: float
    max_correlation: float
    n_distinct: int
    most_common: int


class Overview(BaseModel):
    """An overview of the collection. The statistics use at most 50,000 images, drawn at random.

    `distances`: random pairs at each Hamming distance. `labels`: the 200 most frequent. `map`: up to 2,000 images by
    the first two principal components of their bits, which hold the share `explained` of the variance.
    """

    n_images: int
    n_bits: int
    n_sampled: int
    bits: BitFigures | None
    distances: list[int]
    labels: list[LabelOverview]
    explained: float
    map: list[MapPoint]


class CollectionSummary(BaseModel):
    """A collection. `url` has its search page, and its API at `url` + v1; the counts are null until it is loaded.

    `fingerprint` is of its checkpoint.
    """

    name: str
    url: str
    status: Literal["loading", "ready", "failed"]
    n_images: int | None
    n_bits: int | None
    fingerprint: str | None


class CollectionList(BaseModel):
    """The collections of the service, by name."""

    collections: list[CollectionSummary]


class Report(BaseModel):
    """A report of an evaluation or a training run; its page is at `url`."""

    name: str
    url: str


class ReportList(BaseModel):
    """Reports, by name."""

    reports: list[Report]


class Session(BaseModel):
    """The name and role of the key in use. Without keys, everyone may do everything: null and admin."""

    key: str | None
    role: Literal["read", "write", "admin"]


class Health(BaseModel):
    """Whether the service is alive, or ready to search."""

    status: str


class ProblemDetails(BaseModel):
    """An error (RFC 9457): `type` is for programs, `detail` for people."""

    model_config = ConfigDict(json_schema_extra={"examples": [_PROBLEM]})

    type: str
    title: str
    status: int
    detail: str
    request_id: str
