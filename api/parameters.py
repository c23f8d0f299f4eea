"""The parameters of requests: one pydantic model for each kind of query string and form. The routes use them.

An unknown parameter is refused, since a filter with a misspelled name would let everything through.
"""

from typing import Annotated, Any, Literal

from fastapi import UploadFile
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    Json,
)

from hashseek.indexing.catalog.filters import FILTER_HELP, Filter, make_filter
from hashseek.indexing.searcher import OVERSAMPLE, Rank, SearchOptions
from hashseek.retrieval.errors import BadConfig, BadImage

DEFAULT_K = 10
Word = Annotated[str, Field(min_length=1)]


class NoParameters(BaseModel):
    """A request without parameters, and the base class of the others."""

    model_config = ConfigDict(extra="forbid")


class FilterParameters(NoParameters):
    """Which images."""

    label: list[Word] = Field(default=[], max_length=64, description=FILTER_HELP["all_labels"])
    any_label: list[Word] = Field(default=[], max_length=1000, description=FILTER_HELP["any_labels"])
    without: list[Word] = Field(default=[], max_length=1000, description=FILTER_HELP["no_labels"])
    where: list[Word] = Field(default=[], max_length=64, description=FILTER_HELP["where"])
    ids: list[int] = Field(default=[], alias="id", max_length=10_000, description=FILTER_HELP["ids"])
    keys: list[Word] = Field(default=[], alias="key", max_length=10_000, description=FILTER_HELP["keys"])
    added_after: str | None = Field(default=None, description=FILTER_HELP["added_after"])
    added_before: str | None = Field(default=None, description=FILTER_HELP["added_before"])

    def among(self) -> Filter | None:
        """The filter; None if every image passes.

        Raises:
            BadConfig: an invalid condition or time.
        """
        return make_filter(
            all_labels=self.label,
            any_labels=self.any_label,
            no_labels=self.without,
            where=self.where,
            ids=self.ids,
            keys=self.keys,
            added_after=self.added_after,
            added_before=self.added_before,
        )


class SearchParameters(FilterParameters):
    """How many images to find, within which distance, and among which images."""

    k: int | None = Field(
        default=None,
        ge=1,
        description=f"Number of results; default {DEFAULT_K}, or the service's own limit if that is lower.",
    )
    offset: int = Field(
        default=0, ge=0, description="Leave out so many of the best results. k + offset is limited as k is."
    )
    max_distance: int | None = Field(default=None, ge=0, description="Largest Hamming distance, in bits.")
    min_precision: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Instead of max_distance: the largest radius within which this share of the images is expected to "
        "be relevant. The collection needs a calibration (`hashseek index calibrate`).",
    )
    effort: int | None = Field(
        default=None,
        description="For approximate indexes: how thoroughly to search. /v1/stats lists some values. An exact index "
        "takes none.",
    )
    rank: Rank | None = Field(
        default=None,
        description="What orders the hits: hamming (the distance), asymmetric (the query's outputs with the stored "
        "bits) or float (the cosine of features, which the collection must keep). Default: asymmetric for an uploaded "
        "image, hamming for a stored one.",
    )
    oversample: int = Field(
        default=OVERSAMPLE,
        ge=1,
        le=100,
        description="asymmetric and float order the oversample x k nearest images by Hamming distance.",
    )
    include: list[Literal["histogram"]] = Field(
        default=[],
        max_length=1,
        description="histogram: how many images that pass the filters have each Hamming distance from 0 to n_bits, "
        "whatever max_distance is.",
    )

    def options(self, *, max_k: int) -> SearchOptions:
        """The options of the search.

        Raises:
            BadConfig: it reaches beyond `max_k` results, or has an invalid filter.
        """
        k = self.k or min(DEFAULT_K, max_k)
        if k + self.offset > max_k:
            raise BadConfig(
                f"k is {k} and offset {self.offset}, but this service returns at most the first {max_k:,} results"
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


class WithImage(NoParameters):
    """A form with an uploaded image."""

    image: UploadFile = Field(description="The image file.")

    def content(self) -> bytes:
        """The bytes of the image.

        Raises:
            BadImage: there are none.
        """
        data = self.image.file.read()
        if not data:
            raise BadImage("the upload is empty (0 bytes)")
        return data


class SearchVector(SearchParameters):
    """A search with a vector, sent as JSON."""

    vector: list[FiniteFloat] = Field(
        min_length=1, description="As many numbers as the vectors of the collection have."
    )


class SearchForm(SearchParameters, WithImage):
    """A search with an uploaded image."""


def _split(values: list[str]) -> list[str]:
    parts = (part.strip() for value in values for part in value.split(";"))
    return list(dict.fromkeys(part for part in parts if part))


class AddForm(WithImage):
    """An image to store."""

    labels: Annotated[list[str], BeforeValidator(_split)] = Field(
        default=[], description="Labels, separated by `;` or repeated."
    )
    key: str | None = Field(default=None, description="Your own name for the image, 1 to 512 characters.")
    attributes: Json[dict[str, Any]] = Field(
        default={}, description="A JSON object of at most 16 KiB, for filters to use."
    )


class ImageChanges(NoParameters):
    """What replaces the labels or attributes of an image; what is not given stays."""

    labels: list[str] | None = Field(default=None, description="All labels that it has from now on.")
    attributes: dict[str, Any] | None = Field(default=None, description="All attributes that it has from now on.")


class DeleteParameters(FilterParameters):
    """Which images to delete."""

    expected: int = Field(ge=1, description="How many images pass the filters. If others do, nothing is deleted (409).")


class PageParameters(FilterParameters):
    """Which stored images to list."""

    after: int = Field(default=0, ge=0, le=2**63 - 1, description="Only ids above this one.")
    limit: int = Field(default=24, ge=1, le=1000, description="Number of images.")


class FileParameters(NoParameters):
    """How to return an image file."""

    size: int | None = Field(
        default=None, ge=16, le=1024, description="Return a thumbnail whose longer side has this many pixels."
    )
