"""What adding, searching and serving need of a collection, wherever it is kept. `Collection` is the one in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog.attributes import Ids
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.catalog.records import Change, FileRecord, NewImage, StoredCode, StoredImage
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.errors import BadCollection

if TYPE_CHECKING:  # it loads FAISS
    from hashseek.indexing.index.hamming_index import Distances


class StoreUnavailable(BadCollection):
    """The server that keeps a collection does not answer; the same call may succeed later."""


class Coded(Protocol):
    """Codes of one checkpoint, at a place that messages can name."""

    @property
    def place(self) -> str:
        """Where it is kept."""

    @property
    def n_bits(self) -> int:
        """K, the length of the codes."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the checkpoint that computed the codes."""

    @property
    def keeps_features(self) -> bool:
        """Whether features are stored, which `rank = "float"` compares."""


class Target(Protocol):
    """Where `ingest` stores images: a `Store`, or what stands in for it in a dry run."""

    @property
    def keeps_features(self) -> bool:
        """Whether images need features."""

    def add(self, images: list[NewImage], *, replaced: set[str] | None = None) -> list[tuple[int, Change]]:
        """Store images, see `Catalog.add`: durable when it returns, and found at once.

        Args:
            images: to be stored.
            replaced: kept files that were replaced are added to it, for a later `drop_files`; None deletes them now.
        """

    def drop_files(self, paths: set[str]) -> None:
        """Delete kept files, given by the paths of records, unless an image still has that path."""

    def get(self, ids: Sequence[int]) -> list[StoredImage | None]:
        """Records by id, in that order; None for an id that is not stored."""

    def ids_by_hash(self, hashes: Sequence[str]) -> dict[str, int]:
        """Ids of the stored ones among these content hashes; the lowest id if several images have one content."""

    def code_by_hash(self, sha256: str) -> StoredCode | None:
        """The code of a content that is stored already: it need not be encoded again."""

    def records_by_path(self, paths: Sequence[str]) -> dict[str, FileRecord]:
        """The record of each of these paths that has one; the last of several."""


class Store(Target, Coded, Protocol):
    """An open collection. Safe to use from several threads.

    An id that is not stored raises `UnknownImage`, an invalid filter or option `BadConfig`, a store that cannot be read
    `BadCollection`. `Collection` and `Catalog` explain what is not explained here.
    """

    @property
    def checkpoint(self) -> Path:
        """A file with the checkpoint of the codes."""

    @property
    def kind(self) -> str:
        """The kind of its index."""

    @property
    def finds_all(self) -> bool:
        """Whether searches without a filter or a largest distance are exact, too."""

    def __len__(self) -> int: ...

    def close(self) -> None:
        """Close files or connections."""

    def add_with_file(self, image: NewImage, data: bytes, *, suffix: str) -> tuple[int, Change]:
        """Store an image and keep its file, whose content is `data`; returns (id, what changed)."""

    def update(
        self, image_id: int, *, labels: Sequence[str] | None = None, attributes: Mapping[str, Any] | None = None
    ) -> StoredImage:
        """Replace the labels or the attributes of an image, or both; returns its record."""

    def remove(self, ids: list[int], *, missing_ok: bool = False) -> None:
        """Remove images, all or none; with `missing_ok`, ids that are not stored are ignored."""

    def one(self, image_id: int) -> StoredImage:
        """The record of one image."""

    def by_key(self, key: str) -> StoredImage:
        """The record of the image with this key."""

    def ids_by_key(self, keys: Sequence[str]) -> dict[str, int]:
        """Ids of the stored ones among these keys."""

    def ids_where(self, chosen: Filter) -> Ids:
        """Ids (ascending) of the images that a filter lets through."""

    def browse(
        self, among: Filter | None, *, after: int = 0, offset: int = 0, limit: int
    ) -> tuple[list[StoredImage], int]:
        """At most `limit` records with ids above `after`, without the first `offset`, and how many pass the filter."""

    def code(self, image_id: int) -> Codes:
        """Packed code (1, code_size) of one image."""

    def features_of(self, ids: Sequence[int]) -> tuple[Ids, NDArray[np.float16]]:
        """(ids (n,), features (n, D)) of those of the images that have features, in no order."""

    def uri_of(self, image: StoredImage) -> str:
        """Where the image is, for `indexing.ingest.uris.open_uri`: a file, a member of a tar, or a URL."""

    def search(
        self,
        query_codes: Codes,
        *,
        k: int,
        max_distance: int | None = None,
        among: Ids | Filter | None = None,
        effort: int | None = None,
    ) -> list[tuple[Distances, Ids]]:
        """For each query at most the k nearest: (distances, ids), nearest first, equal distances by ascending id."""

    def candidates(
        self,
        query_code: Codes,
        *,
        n: int,
        max_distance: int | None = None,
        among: Ids | Filter | None = None,
        effort: int | None = None,
    ) -> tuple[Distances, Ids, Codes]:
        """The `n` nearest images and all others at the distance of the last: (distances, ids, packed codes)."""

    def histogram(self, query_code: Codes, *, among: Ids | Filter | None = None) -> NDArray[np.int64] | None:
        """How many images have each Hamming distance 0 to K: counts (K + 1,). None if the store cannot count them."""

    def label_counts(self) -> dict[str, int]:
        """Number of images per label, by name."""

    def engines(self) -> dict[str, int]:
        """Number of codes per engine that computed them; "" where the engine is unknown."""

    def calibration(self) -> Any | None:
        """The calibration of the codes as JSON, see `hashseek.indexing.calibration`; None if there is none."""

    def describe_index(self) -> dict[str, Any]:
        """Kind and state of the index."""

    def check_readable(self) -> object:
        """Raise `BadCollection` if records cannot be read now."""

    def is_current(self) -> bool:
        """Whether opening the place again would give the same collection with the same codes."""

    def merge_segments(self) -> bool:
        """Merge new images into the index if that pays off by now; returns whether it did."""

    def save_index(self) -> None:
        """Make sure that the next process opens the collection quickly."""
