"""Encoder and codes together: an image in, hits out. The one path that CLI, service and evaluation use."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from PIL import Image

from hashseek.indexing.calibration import radius_for, stored_calibration
from hashseek.indexing.catalog import StoredImage
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.collection import Collection, check_checkpoint
from hashseek.indexing.index.hamming_index import Distances, HammingIndex, Ids, build_index
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.devices import n_cores
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig, ForeignCodes
from hashseek.retrieval.images import Picture, decode_for


class Searchable(Protocol):
    """What a searcher searches: a collection, or codes in memory."""

    @property
    def n_bits(self) -> int:
        """K."""

    def search(
        self, query_codes: Codes, *, k: int, max_distance: int | None = None, effort: int | None = None
    ) -> list[tuple[Distances, Ids]]:
        """(distances, ids) for each query, nearest first, ties by ascending id."""


class InMemory:
    """Codes without a catalog, for evaluation: ids are positions."""

    def __init__(self, codes: Codes, *, n_bits: int) -> None:
        self.n_bits = n_bits
        self.index: HammingIndex = build_index(codes, np.arange(len(codes)), n_bits=n_bits)

    def search(
        self, query_codes: Codes, *, k: int, max_distance: int | None = None, effort: int | None = None
    ) -> list[tuple[Distances, Ids]]:
        """(distances, ids) for each query, nearest first, ties by ascending id."""
        if max_distance is not None:
            return self.index.range(query_codes, radius=max_distance, k=k)
        return list(zip(*self.index.search(query_codes, k=k, effort=effort), strict=True))


@dataclass(frozen=True)
class Hit:
    """One result: rank from 1, distance in bits, the image's record, and how likely one at this distance is relevant.

    `relevance` is None in a collection without a calibration.
    """

    rank: int
    distance: int
    image: StoredImage
    relevance: float | None = None


@dataclass(frozen=True)
class Answer:
    """The hits of one query, and what it took (milliseconds)."""

    hits: tuple[Hit, ...]
    encode_ms: float
    search_ms: float


class Searcher:
    """Searches codes with images. Safe to use from several threads.

    Args:
        encoder: of the checkpoint that made the codes.
        codes: a collection, or codes in memory.
    """

    def __init__(self, encoder: Encoder, codes: Searchable) -> None:
        if isinstance(codes, Collection) and codes.fingerprint != encoder.fingerprint:
            raise ForeignCodes(
                f"codes of checkpoint {codes.fingerprint[:12]} cannot be searched with {encoder.fingerprint[:12]}: "
                "distances between them mean nothing; use the collection's own checkpoint"
            )
        self.encoder = encoder
        self.codes = codes
        # A picture may take half a gigabyte while it is decoded: no more of them at a time than cores can work on.
        self.decoding = threading.Semaphore(n_cores())

    @classmethod
    def open(
        cls,
        collection: Collection,
        *,
        checkpoint: Path | None = None,
        device: str = "auto",
        precision: str = "auto",
        engine: str = "torch",
    ) -> Self:
        """A searcher over `collection` with its own checkpoint, or another file of the same fingerprint."""
        source = collection.checkpoint if checkpoint is None else checkpoint
        check_checkpoint(collection.catalog, source)
        return cls(Encoder(load_checkpoint(source), device=device, precision=precision, engine=engine), collection)

    def decode(self, data: bytes, *, name: str = "the image") -> Picture:
        """Decode a picture as it is decoded when it is indexed: a stored image is found at distance 0.

        Raises:
            BadImage: it is not a usable image.
        """
        with self.decoding:
            return decode_for(data, self.encoder.preprocessing, name=name)[0]

    def rank(
        self, query_codes: Codes, *, k: int, max_distance: int | None = None, effort: int | None = None
    ) -> list[tuple[Distances, Ids]]:
        """(distances, ids) for each query code, nearest first, ties by ascending id.

        `effort` is for approximate indexes, see `HammingIndex.search`.

        Raises:
            BadConfig: k < 1, max_distance < 0, or an effort that the index does not know.
        """
        check_limits(k, max_distance)
        return self.codes.search(query_codes, k=k, max_distance=max_distance, effort=effort)

    def search(
        self,
        images: Sequence[Image.Image],
        *,
        k: int,
        max_distance: int | None = None,
        min_precision: float | None = None,
        among: Filter | None = None,
        effort: int | None = None,
    ) -> list[Answer]:
        """The hits of each image, which `decode` gave, in the collection, see `Collection.search`.

        `min_precision` stands for the largest max_distance within which so large a share of the images is expected to
        be relevant, see `hashseek.indexing.calibration`.

        Raises:
            BadConfig: values beyond their limits, or a precision that no radius is known to give.
        """
        check_limits(k, max_distance)
        max_distance = self._radius(max_distance, min_precision)
        started = time.perf_counter()
        codes = self.encoder.encode(images)
        encode_ms = 1000 * (time.perf_counter() - started) / max(len(images), 1)
        return [
            self.answer(code[None], k=k, max_distance=max_distance, among=among, effort=effort, encode_ms=encode_ms)
            for code in codes
        ]

    def similar(
        self,
        image_id: int,
        *,
        k: int,
        max_distance: int | None = None,
        min_precision: float | None = None,
        among: Filter | None = None,
        effort: int | None = None,
    ) -> Answer:
        """The hits of an image that is stored already, itself among them if the filter lets it through."""
        max_distance = self._radius(max_distance, min_precision)
        code = self.collection.catalog.code(image_id)
        return self.answer(code, k=k, max_distance=max_distance, among=among, effort=effort)

    def answer(
        self,
        code: Codes,
        *,
        k: int,
        max_distance: int | None = None,
        among: Filter | None = None,
        effort: int | None = None,
        encode_ms: float = 0.0,
    ) -> Answer:
        """The hits of one code (1, code_size) with their records."""
        started = time.perf_counter()
        check_limits(k, max_distance)
        [(distances, ids)] = self.collection.search(code, k=k, max_distance=max_distance, among=among, effort=effort)
        records = self.collection.catalog.get(ids.tolist())
        # An image removed since the ranking has no record any more, and is no hit.
        found = [(int(d), record) for d, record in zip(distances, records, strict=True) if record is not None]
        calibrated = stored_calibration(self.collection.catalog) if found else None
        likely = None if calibrated is None else calibrated.calibration.at_distance
        hits = tuple(
            Hit(rank, distance, record, None if likely is None else likely[distance])
            for rank, (distance, record) in enumerate(found, start=1)
        )
        return Answer(hits, encode_ms, 1000 * (time.perf_counter() - started))

    def _radius(self, max_distance: int | None, min_precision: float | None) -> int | None:
        """`max_distance`, or the radius that `min_precision` stands for."""
        if min_precision is None:
            return max_distance
        if max_distance is not None:
            raise BadConfig(
                f"max_distance {max_distance} and min_precision {min_precision} both set the radius: say one of them"
            )
        return radius_for(stored_calibration(self.collection.catalog), min_precision)

    @property
    def collection(self) -> Collection:
        """The collection that is searched."""
        if not isinstance(self.codes, Collection):
            raise TypeError("codes in memory have no records; search them with rank()")
        return self.codes


def check_limits(k: int, max_distance: int | None) -> None:
    """Raise `BadConfig` unless k >= 1 and max_distance, if given, is at least 0."""
    if k < 1:
        raise BadConfig(f"k is the number of results and must be at least 1, not {k}")
    if max_distance is not None and max_distance < 0:
        raise BadConfig(f"max_distance counts bits and must be at least 0, not {max_distance}")
