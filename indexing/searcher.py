"""The searcher: an image in, hits out. The CLI, the service and evaluation all search with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, Unpack

import numpy as np
from PIL import Image

from hashseek.indexing.calibration import radius_for, stored_calibration
from hashseek.indexing.catalog import StoredImage
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.collection import Collection, check_checkpoint
from hashseek.indexing.index.hamming_index import Distances, HammingIndex, Ids, build_index
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.devices import EncoderOptions, n_cores
from hashseek.retrieval.errors import BadConfig, ForeignCodes
from hashseek.retrieval.images import Picture, decode_for

if TYPE_CHECKING:
    from hashseek.retrieval.encoder import Encoder


@dataclass(frozen=True)
class SearchOptions:
    """Parameters of a search.

    Args:
        k: the number of hits, at least 1; a larger k than the collection holds returns all of it.
        max_distance: leave out images that are further away (bits).
        min_precision: instead of `max_distance`: the largest distance within which this share of the images is expected
            to be relevant. The collection needs a calibration, see `hashseek.indexing.calibration`.
        among: only images that pass this filter are ranked.
        effort: how hard an approximate index searches, see `HammingIndex.search`; an exact index takes none.

    Raises:
        BadConfig: a value is outside its limits, or both `max_distance` and `min_precision` are given.
    """

    k: int = 10
    max_distance: int | None = None
    min_precision: float | None = None
    among: Filter | None = None
    effort: int | None = None

    def __post_init__(self) -> None:
        if self.k < 1:
            raise BadConfig(f"k is the number of results and must be at least 1, not {self.k}")
        if self.max_distance is not None and self.max_distance < 0:
            raise BadConfig(f"max_distance counts bits and must be at least 0, not {self.max_distance}")
        if self.max_distance is not None and self.min_precision is not None:
            raise BadConfig(
                f"max_distance ({self.max_distance}) and min_precision ({self.min_precision}) both limit the distance: "
                "give only one of them"
            )


class Searchable(Protocol):
    """Codes that can be searched: a collection, or codes in memory."""

    @property
    def n_bits(self) -> int:
        """Length K of the codes."""

    def search(
        self, query_codes: Codes, *, k: int, max_distance: int | None = None, effort: int | None = None
    ) -> list[tuple[Distances, Ids]]:
        """(distances, ids) of each query, nearest first, ties by ascending id."""


class InMemory:
    """Codes without a catalog, for evaluation: an id is a row number."""

    def __init__(self, codes: Codes, *, n_bits: int) -> None:
        self.n_bits = n_bits
        self.index: HammingIndex = build_index(codes, np.arange(len(codes)), n_bits=n_bits)

    def search(
        self, query_codes: Codes, *, k: int, max_distance: int | None = None, effort: int | None = None
    ) -> list[tuple[Distances, Ids]]:
        """(distances, ids) of each query, nearest first, ties by ascending id."""
        if max_distance is not None:
            return self.index.range(query_codes, radius=max_distance, k=k)
        return list(zip(*self.index.search(query_codes, k=k, effort=effort), strict=True))


@dataclass(frozen=True)
class Hit:
    """One result: rank from 1, distance in bits, the image's record, and the probability that it is relevant.

    `relevance` is None if the collection has no calibration.
    """

    rank: int
    distance: int
    image: StoredImage
    relevance: float | None = None


@dataclass(frozen=True)
class Answer:
    """The hits of one query, and how long encoding and searching took (milliseconds)."""

    hits: tuple[Hit, ...]
    encode_ms: float
    search_ms: float


class Searcher:
    """Searches codes with images. Safe to use from several threads.

    Args:
        encoder: with the checkpoint that made the codes.
        codes: a collection, or codes in memory.

    Raises:
        ForeignCodes: the collection's codes were made with another checkpoint.
    """

    def __init__(self, encoder: Encoder, codes: Searchable) -> None:
        if isinstance(codes, Collection) and codes.fingerprint != encoder.fingerprint:
            raise ForeignCodes(
                f"codes of checkpoint {codes.fingerprint[:12]} cannot be searched with checkpoint "
                f"{encoder.fingerprint[:12]}: use the collection's own checkpoint"
            )
        self.encoder = encoder
        self.codes = codes
        # An image may take half a gigabyte while it is decoded: decode no more of them at a time than there are cores.
        self.decoding = threading.Semaphore(n_cores())

    @classmethod
    def open(cls, collection: Collection, *, checkpoint: Path | None = None, **options: Unpack[EncoderOptions]) -> Self:
        """A searcher over `collection`, with its own checkpoint or another file of the same fingerprint.

        Raises:
            ForeignCodes: the checkpoint did not make the collection's codes.
        """
        from hashseek.retrieval.encoder import Encoder  # loads torch, which wrong arguments need not wait for

        source = collection.checkpoint if checkpoint is None else checkpoint
        check_checkpoint(collection.catalog, source)
        return cls(Encoder(load_checkpoint(source), **options), collection)

    def decode(self, data: bytes, *, name: str = "the image") -> Picture:
        """Decode an image exactly as `index add` does, so that a stored image is found at distance 0.

        Raises:
            BadImage: it is not a usable image.
        """
        with self.decoding:
            return decode_for(data, self.encoder.preprocessing, name=name)[0]

    def rank(
        self, query_codes: Codes, *, k: int, max_distance: int | None = None, effort: int | None = None
    ) -> list[tuple[Distances, Ids]]:
        """(distances, ids) of each query code, nearest first, ties by ascending id.

        Raises:
            BadConfig: a value is outside its limits, or the index takes no such effort.
        """
        options = SearchOptions(k, max_distance, effort=effort)
        return self.codes.search(query_codes, k=options.k, max_distance=options.max_distance, effort=options.effort)

    def search(self, images: Sequence[Image.Image], options: SearchOptions) -> list[Answer]:
        """The hits of each image; `decode` reads images from bytes.

        Raises:
            BadConfig: no distance is known to give `min_precision`, or the index takes no such effort.
        """
        max_distance = self._max_distance(options)
        started = time.perf_counter()
        codes = self.encoder.encode(images)
        encode_ms = 1000 * (time.perf_counter() - started) / max(len(images), 1)
        return [self._answer(code[None], options, max_distance, encode_ms) for code in codes]

    def similar(self, image_id: int, options: SearchOptions) -> Answer:
        """The hits of a stored image. It is among them itself if it passes the filter.

        Raises:
            BadConfig: as `search`.
            UnknownImage: there is no such image.
        """
        max_distance = self._max_distance(options)
        return self._answer(self.collection.catalog.code(image_id), options, max_distance)

    def _answer(self, code: Codes, options: SearchOptions, max_distance: int | None, encode_ms: float = 0.0) -> Answer:
        """The hits of one code (1, code_size) with their records."""
        started = time.perf_counter()
        [(distances, ids)] = self.collection.search(
            code, k=options.k, max_distance=max_distance, among=options.among, effort=options.effort
        )
        records = self.collection.catalog.get(ids.tolist())
        # Images removed since they were ranked have no record any more.
        found = [(int(d), record) for d, record in zip(distances, records, strict=True) if record is not None]
        stored = stored_calibration(self.collection.catalog) if found else None
        hits = tuple(
            Hit(rank, distance, record, None if stored is None else stored.calibration.at_distance[distance])
            for rank, (distance, record) in enumerate(found, start=1)
        )
        return Answer(hits, encode_ms, 1000 * (time.perf_counter() - started))

    def _max_distance(self, options: SearchOptions) -> int | None:
        if options.min_precision is None:
            return options.max_distance
        return radius_for(stored_calibration(self.collection.catalog), options.min_precision)

    @property
    def collection(self) -> Collection:
        """The collection that is searched."""
        if not isinstance(self.codes, Collection):
            raise TypeError("codes in memory have no records: search them with rank()")
        return self.codes
