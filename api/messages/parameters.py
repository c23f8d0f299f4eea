"""The parameters of requests: one pydantic model for each kind of query string and form.

An unknown parameter is refused, since a filter with a misspelled name would let everything through.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, TypeVar

from fastapi import UploadFile
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    Json,
    StringConstraints,
    model_validator,
)

from hashseek.indexing.catalog.filters import FILTER_HELP, Filter, make_filter
from hashseek.indexing.catalog.records import MAX_KEY, MAX_LABEL, MAX_LABELS
from hashseek.indexing.searcher import Combine, Rank, SearchOptions
from hashseek.retrieval.errors import BadConfig

MAX_QUERIES = 64  # of one request
MAX_URL = 2000  # characters
MAX_BATCH = 64  # images stored by one request
MAX_FILES = 16  # files that together form one query
MAX_RADIUS = 8  # of near-duplicates
MAX_IN_GROUP = 100  # images of a group of near-duplicates in an answer, or to keep
Id = Annotated[int, Field(ge=1, le=2**63 - 1)]
Word = Annotated[str, Field(min_length=1)]
Label = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_LABEL)]
NewKey = Annotated[str, Field(description="Your own name for the image, 1 to 512 characters.", examples=["shop/4711"])]
Vector = Annotated[
    list[FiniteFloat],
    Field(
        min_length=1,
        description="A vector with as many numbers as those of the collection.",
        examples=[[0.5, -1.25, 3]],
    ),
]


T = TypeVar("T")
# A field that is None if it is not given. Pydantic sees only T, and so refuses null.
if TYPE_CHECKING:
    Given: TypeAlias = T | None
else:
    Given = Annotated[T, "or not given"]


class NoParameters(BaseModel):
    """A request without parameters, and the base class of the others."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_bool(cls, values: Any) -> Any:
        for value in values.values() if isinstance(values, dict) else ():  # a JSON body may be anything
            if any(isinstance(one, bool) for one in (value if isinstance(value, list) else [value])):  # as 0 or 1
                raise ValueError("true and false are not allowed: no field takes them")
        return values


class FilterParameters(NoParameters):
    """Which images: the arguments of `make_filter`, some under shorter names."""

    all_labels: list[Word] = Field(
        default=[], alias="label", max_length=64, description=FILTER_HELP["all_labels"], examples=[["cat"]]
    )
    any_labels: Given[list[Word]] = Field(
        default=None,
        alias="any_label",
        min_length=1,
        max_length=64,
        description=FILTER_HELP["any_labels"],
        examples=[["cat", "dog"]],
    )
    no_labels: list[Word] = Field(
        default=[], alias="without", max_length=64, description=FILTER_HELP["no_labels"], examples=[["drawing"]]
    )
    where: list[Word] = Field(default=[], max_length=64, description=FILTER_HELP["where"], examples=[["year>=2015"]])
    ids: Given[list[int]] = Field(
        default=None, alias="id", min_length=1, max_length=1000, description=FILTER_HELP["ids"], examples=[[3, 7]]
    )
    keys: Given[list[Word]] = Field(
        default=None,
        alias="key",
        min_length=1,
        max_length=1000,
        description=FILTER_HELP["keys"],
        examples=[["shop/4711"]],
    )
    added_after: Given[str] = Field(default=None, description=FILTER_HELP["added_after"], examples=["2026-01-31"])
    added_before: Given[str] = Field(
        default=None, description=FILTER_HELP["added_before"], examples=["2026-02-28T12:00:00Z"]
    )

    def among(self) -> Filter | None:
        """The filter; None if every image passes.

        Raises:
            BadConfig: an invalid condition or time.
        """
        return make_filter(**{name: getattr(self, name) for name in FILTER_HELP})


class SearchParameters(FilterParameters):
    """How many images to find, within which distance, and among which images."""

    k: Given[int] = Field(
        default=None,
        ge=1,
        description=f"Number of results; default {SearchOptions.k}, or the service's own limit if that is lower.",
        examples=[5],
    )
    offset: int = Field(
        default=0, ge=0, description="Number of best results to skip. k + offset has the same limit as k."
    )
    max_distance: Given[int] = Field(
        default=None, ge=0, description="Largest Hamming distance, in bits.", examples=[12]
    )
    min_precision: Given[float] = Field(
        default=None,
        ge=0,
        le=1,
        description="Instead of max_distance: use the largest radius within which this share of the images is expected "
        "to be relevant. The collection needs a calibration (`hashseek index calibrate`).",
        examples=[0.9],
    )
    effort: Given[int] = Field(
        default=None,
        description="For approximate indexes: how thoroughly to search. /v1/stats lists some values. An exact index "
        "does not accept it.",
        examples=[64],
    )
    rank: Given[Rank] = Field(
        default=None,
        description="How hits are ordered: hamming (by distance), asymmetric (the query's outputs against the stored "
        "bits) or float (the cosine of features, which the collection must store). Default: asymmetric for an uploaded "
        "image, hamming for a stored one.",
    )
    oversample: int = Field(
        default=SearchOptions.oversample,
        ge=1,
        le=100,
        description="asymmetric and float reorder the oversample x k nearest images by Hamming distance.",
    )
    include: list[Literal["histogram"]] = Field(
        default=[],
        max_length=1,
        description="histogram: the number of images that match the filters at each Hamming distance from 0 to n_bits, "
        "regardless of max_distance.",
    )

    def options(self, *, max_k: int, n_queries: int = 1) -> SearchOptions:
        """The options for the searches of one request.

        Raises:
            BadConfig: they ask for more than `max_k` results, or have an invalid filter.
        """
        k = self.k or min(SearchOptions.k, max_k)
        if (k + self.offset) * n_queries > max_k:
            queries = f" for {n_queries} queries" if n_queries > 1 else ""
            raise BadConfig(
                f"k is {k} and offset {self.offset}{queries}, but this service returns at most the first {max_k:,} "
                "results, counted over all queries: lower k or offset"
            )
        return SearchOptions(
            k=k,
            max_distance=self.max_distance,
            min_precision=self.min_precision,
            among=self.among(),
            effort=self.effort,
            rank=self.rank,
            oversample=self.oversample,
            offset=self.offset,
            histogram="histogram" in self.include,
        )


def _files_only(given: Any) -> Any:
    """Refuse text in place of a file."""
    if isinstance(given, str) or (isinstance(given, list) and any(isinstance(one, str) for one in given)):
        raise ValueError("must be a file, not text: send it with a file name, as curl -F image=@FILE does")
    return given


def _filled_in(labels: list[str]) -> list[str]:
    """Labels without those that a browser sends for empty fields."""
    return [label for label in labels if label]


class SearchForm(SearchParameters):
    """A search with uploaded images."""

    image: Annotated[list[UploadFile], BeforeValidator(_files_only)] = Field(
        min_length=1,
        max_length=MAX_FILES,
        description="The image file; several files form one query, see combine.",
    )
    combine: Combine = Field(
        default="mean",
        description="With several files: mean searches with the mean of their outputs, union with each of them; a hit "
        "then has its least distance and its highest score. A union has no histogram.",
    )


class SearchQuery(NoParameters):
    """What to search with: one of these."""

    image_id: Given[int] = Field(default=None, description="The id of a stored image.", examples=[12])
    image_key: Given[str] = Field(
        default=None, min_length=1, max_length=MAX_KEY, description="The key of a stored image.", examples=["shop/4711"]
    )
    code: Given[str] = Field(
        default=None,
        pattern="^([0-9a-fA-F]{2}){1,128}$",
        description="A code in hex, as returned by /v1/encode: bit j is bit j % 8 of byte j // 8.",
        examples=["b1c47f3a0d22"],
    )
    vector: Given[Vector] = None


class SearchBody(SearchParameters, SearchQuery):
    """A search with one stored image, code, vector or picture at a URL, or with several queries.

    Exactly one of image_id, image_key, code, vector, url and queries is needed.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"image_id": 12, "k": 5, "label": ["cat"]},
                {"queries": [{"image_key": "shop/4711"}, {"code": "b1c47f3a0d22"}], "include": ["histogram"]},
            ],
        }
    )

    url: Given[str] = Field(
        default=None,
        min_length=1,
        max_length=MAX_URL,
        description="An http or https URL of a picture, on a host that the service allows (--url-host).",
        examples=["https://pictures.example/cat.jpg"],
    )
    queries: Given[list[SearchQuery]] = Field(
        default=None,
        min_length=1,
        max_length=MAX_QUERIES,
        description="Several queries; each is answered separately.",
        examples=[[{"image_id": 12}, {"image_key": "shop/4711"}]],
    )
    fingerprint: Given[str] = Field(
        default=None,
        description="Fingerprint of the checkpoint of the codes; 409 if the collection has another one.",
        examples=["9f2c" * 16],
    )

    @model_validator(mode="after")
    def _check_queries(self) -> Self:
        for query in (self, *(self.queries or ())):
            kinds = [*SearchQuery.model_fields, *(("url", "queries") if query is self else ())]
            given = query.model_fields_set & {*kinds}
            if len(given) != 1:
                named = ", ".join(sorted(given)) or "nothing"
                raise ValueError(f"a query must be one of {', '.join(kinds)}, not {named}")
        return self


class EncodeForm(NoParameters):
    """An image to encode."""

    image: Annotated[UploadFile, BeforeValidator(_files_only)] = Field(description="The image file.")


class EncodeBody(NoParameters):
    """A vector to encode."""

    vector: Vector


class AddForm(EncodeForm):
    """An image to store."""

    labels: Annotated[list[Label], BeforeValidator(_filled_in)] = Field(
        default=[], max_length=MAX_LABELS, description="A label; repeat it for several.", examples=[["cat", "grey"]]
    )
    key: Given[NewKey] = None
    attributes: Json[dict[str, Any]] = Field(
        default="{}",
        validate_default=True,
        description="A JSON object of at most 16 KiB, for filters to use.",
        examples=['{"year": 2015}'],
    )


class ImageChanges(NoParameters):
    """New labels or attributes for an image; what is not given is kept."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"labels": ["cat"], "attributes": {"year": 2015}}]})

    labels: Given[list[Label]] = Field(
        default=None,
        max_length=MAX_LABELS,
        description="The new labels, replacing all old ones.",
        examples=[["cat", "grey"]],
    )
    attributes: Given[dict[str, Any]] = Field(
        default=None, description="The new attributes, replacing all old ones.", examples=[{"year": 2015}]
    )


class ImageDetails(ImageChanges):
    """The details of one image of a batch."""

    key: Given[NewKey] = None


class AddManyForm(NoParameters):
    """Images to store."""

    image: Annotated[list[UploadFile], BeforeValidator(_files_only)] = Field(
        min_length=1, max_length=MAX_BATCH, description="The image files."
    )
    details: Json[list[ImageDetails]] = Field(
        default="[]",
        validate_default=True,
        description="A JSON list with the key, labels and attributes of each image, in the order of the images.",
        examples=['[{"key": "shop/4711", "labels": ["cat"]}]'],
    )


class DeleteParameters(FilterParameters):
    """Which images to delete."""

    expected: int = Field(
        ge=1, description="Number of images that match the filters. If it differs: 409, none deleted.", examples=[12]
    )


class PageParameters(FilterParameters):
    """Which stored images to list."""

    after: int = Field(default=0, ge=0, le=2**63 - 1, description="Only ids above this one.", examples=[24])
    offset: int = Field(default=0, ge=0, le=2**63 - 1, description="Number of these to skip.")
    limit: int = Field(default=24, ge=1, le=1000, description="Largest number of images to return.")


class NewCollection(NoParameters):
    """An empty collection."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$",
        description="Up to 64 letters, digits, dots, dashes and underscores; also the name of its folder.",
        examples=["shop"],
    )
    like: str = Field(description="A collection of this service whose checkpoint is used.", examples=["pictures"])


class DeleteCollection(NoParameters):
    """Confirmation of the collection to delete."""

    confirm: str = Field(description="The name again; otherwise nothing is deleted.", examples=["shop"])


class DuplicateParameters(NoParameters):
    """Which groups of near-duplicates to list."""

    radius: int = Field(
        ge=0, le=MAX_RADIUS, description="Bits by which two linked images may differ; 0: equal codes.", examples=[2]
    )
    limit: int = Field(default=20, ge=1, le=100, description="Largest number of groups to return.")
    offset: int = Field(default=0, ge=0, le=2**63 - 1, description="Number of groups to skip from the start.")


class KeptGroup(NoParameters):
    """Images that are all to be kept although they look alike."""

    ids: list[Id] = Field(min_length=2, max_length=MAX_IN_GROUP, description="Ids of stored images.", examples=[[3, 7]])


class FileParameters(NoParameters):
    """How to return an image file."""

    size: Given[int] = Field(
        default=None,
        ge=16,
        le=1024,
        description="Return a thumbnail whose longer side has at most this many pixels.",
        examples=[256],
    )
