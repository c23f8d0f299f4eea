"""The searcher: an image in, hits out. The command line, the service and the Python API all search with it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, Unpack, cast, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hashseek.indexing.calibration import radius_for, stored_calibration
from hashseek.indexing.catalog import StoredImage
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.collection import Limits, check_checkpoint
from hashseek.indexing.index.exact_scan import Distances
from hashseek.indexing.index.hamming_index import Ids
from hashseek.indexing.opening import Store
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.codes import Codes, check_codes, pack, unpack
from hashseek.retrieval.devices import EncoderOptions
from hashseek.retrieval.encoder import Encoder, VectorEncoder, WithHeader
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import LoadedFile, load_file
from hashseek.retrieval.micro_batches import MicroBatches
from hashseek.retrieval.scores import StoredFeatures, asymmetric_scores, best, cosines, stored_features
from hashseek.retrieval.vectors import Vectors, as_float32

Rank = Literal["hamming", "asymmetric", "float"]
RANKS: tuple[Rank, ...] = get_args(Rank)
Combine = Literal["mean", "union"]
# Number of images whose features are in memory at the same time.
_FEATURES_AT_ONCE = 10_000


@dataclass(frozen=True)
class SearchOptions:
    """Parameters of a search.

    Args:
        k: the number of hits, at least 1; if larger than the collection, everything is returned.
        max_distance: the largest Hamming distance of a hit, in bits.
        min_precision: instead of `max_distance`: the largest distance within which this share of the images is expected
            to be relevant. The collection needs a calibration, see `hashseek.indexing.calibration`.
        among: only images that match this filter are ranked.
        effort: how thoroughly an approximate index searches, see `HammingIndex.search`; not accepted by an exact one.
        rank: the order of the hits. "hamming": by Hamming distance. "asymmetric": by the query's real outputs, compared
            with the stored bits. "float": by the cosine of the features, which the collection has to store. None:
            "asymmetric" for an image, "hamming" for a stored one, whose outputs are unknown.
        oversample: "asymmetric" and "float" reorder the `oversample` x k nearest images by Hamming distance, and all
            others at the distance of the last. If these are all images, the order is exact. The next `oversample` x k
            follow them, so that the pages of a search with the same k neither overlap nor leave anything out.
        offset: the number of best hits to skip.
        histogram: also count the images that match the filter at each Hamming distance.

    Raises:
        BadConfig: a value is outside its limits, or both `max_distance` and `min_precision` are given.
    """

    k: int = 10
    max_distance: int | None = None
    min_precision: float | None = None
    among: Filter | None = None
    effort: int | None = None
    rank: Rank | None = None
    oversample: int = 10
    offset: int = 0
    histogram: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise BadConfig(f"k is the number of results and must be at least 1, got {self.k}")
        if self.max_distance is not None and self.max_distance < 0:
            raise BadConfig(f"max_distance is in bits and must be at least 0, got {self.max_distance}")
        if self.max_distance is not None and self.min_precision is not None:
            raise BadConfig(
                f"max_distance ({self.max_distance}) and min_precision ({self.min_precision}) both limit the distance: "
                "use only one of them"
            )
        if self.rank is not None and self.rank not in RANKS:
            raise BadConfig(f"there is no ranking {self.rank!r}: use one of {', '.join(RANKS)}")
        if self.oversample < 1:
            raise BadConfig(f"oversample is a factor of k and must be at least 1, got {self.oversample}")


@dataclass(frozen=True)
class Query:
    """A query, to be compared with stored images.

    Args:
        code: packed (code_size,).
        outputs: real outputs (K,); None for a stored image.
        feature: (D,) from `hashseek.retrieval.scores.stored_features`; None if unknown.
    """

    code: NDArray[np.uint8]
    outputs: NDArray[np.float32] | None = None
    feature: StoredFeatures | None = None


@dataclass(frozen=True)
class Hit:
    """One result: rank from 1, Hamming distance in bits, the image's record, and the probability that it is relevant.

    `relevance` is None if the collection has no calibration. Hits are ordered by `score`, highest first, see
    `hashseek.retrieval.scores`; it is None if they are ordered by distance.
    """

    rank: int
    distance: int
    image: StoredImage
    relevance: float | None
    score: float | None


@dataclass(frozen=True)
class Answer:
    """The hits of one query.

    Args:
        hits: best first.
        encode_ms, search_ms: how long encoding and searching took (milliseconds).
        rank: how the hits are ordered.
        is_exact: no better hit was missed, neither by an approximate index nor because `oversample` is too low.
        is_full: k images were found, so there may be more behind them.
        histogram: (K + 1,) images that match the filter at each Hamming distance; None unless asked for.
    """

    hits: tuple[Hit, ...]
    encode_ms: float
    search_ms: float
    rank: Rank
    is_exact: bool
    is_full: bool
    histogram: NDArray[np.int64] | None


class Searcher:
    """Searches a collection with images or vectors. Safe to use from several threads.

    Args:
        encoder: an encoder with the checkpoint that computed the codes, see `open_encoder`.
        collection: the collection to search.
        load: decodes image files; the service decodes them in other processes.
        observe: called with the name of each stage (encode, search, records) and its seconds, and with "batch" and the
            number of images that were encoded together.
    """

    def __init__(
        self,
        encoder: WithHeader,
        collection: Store,
        *,
        load: Callable[..., LoadedFile] = load_file,
        observe: Callable[[str, float], object] = lambda _name, _value: None,
    ) -> None:
        self.encoder = encoder
        self.collection = collection
        self.load, self.observe = load, observe
        # Its functions do not refer to this object: such a cycle would keep the model and the collection in memory.
        self._encode_one = MicroBatches(
            lambda pixels: cast("Encoder", encoder).features_and_outputs(pixels),
            encoder.backbone.online_batch_size if isinstance(encoder, Encoder) else 1,
            lambda n: observe("batch", n),
        )

    @classmethod
    def open(cls, collection: Store, *, checkpoint: Path | None = None, **options: Unpack[EncoderOptions]) -> Self:
        """A searcher over `collection` with the encoder of `open_encoder`."""
        return cls(open_encoder(collection, checkpoint, **options), collection)

    @classmethod
    def of_stored(cls, collection: Store, *, checkpoint: Path | None) -> Self:
        """A searcher that loads no network and can search only with stored images and codes.

        Raises:
            ForeignCodes: see `open_encoder`.
        """
        return cls(WithHeader(check_checkpoint(collection, checkpoint or collection.checkpoint)), collection)

    @property
    def image_encoder(self) -> Encoder:
        """The encoder of images.

        Raises:
            BadCheckpoint: it encodes vectors.
        """
        self.encoder.header.image_preprocessing()
        return cast("Encoder", self.encoder)

    @property
    def vector_encoder(self) -> VectorEncoder:
        """The encoder of vectors.

        Raises:
            BadCheckpoint: it encodes images.
        """
        self.encoder.header.vector_width()
        return cast("VectorEncoder", self.encoder)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.observe(name, time.perf_counter() - started)

    def encode_file(self, data: bytes, *, name: str = "the image") -> tuple[LoadedFile, Query]:
        """Decode and encode an image exactly as `index add` does, so that a stored one is found at distance 0.

        Raises:
            BadImage: it is not a usable image.
            BadCheckpoint: the collection holds vectors.
        """
        encoder = self.image_encoder
        loaded = self.load(data, encoder.preprocessing, name=name)
        with self._stage("encode"):
            [query] = _queries(*self._encode_one(loaded.pixels))
        return loaded, query

    def search(self, image: Image.Image, options: SearchOptions) -> Answer:
        """The hits of a decoded image, see `hashseek.retrieval.images.as_decoded`.

        Raises:
            BadConfig: no distance reaches `min_precision`, or the index does not support this effort.
        """
        self.check(options)
        started = time.perf_counter()
        encoder = self.image_encoder
        queries = _queries(*encoder.features_and_outputs(encoder.pixels_of([image])))
        return self.answer(queries, options, 1000 * (time.perf_counter() - started))

    def search_files(
        self, files: Sequence[bytes], options: SearchOptions, *, combine: Combine = "mean", name: str = "the image"
    ) -> Answer:
        """The hits of an image file with this content, or of several files. Stored content keeps its stored code.

        With "mean", several files are one query: the mean of their outputs and of their features. With "union", a
        stored image has its smallest distance to any of the files, and its highest score.

        Raises:
            BadConfig: see `search`; or a histogram of a union.
            BadImage: one is not a usable image.
            BadCheckpoint: the collection holds vectors.
        """
        if len(files) > 1 and options.histogram and combine == "union":
            raise BadConfig("a union has no histogram: leave it out, or combine by mean")
        self.check(options)
        started = time.perf_counter()
        names = [name] if len(files) == 1 else [f"{name} (number {number})" for number in range(1, len(files) + 1)]
        queries = [self.query_of(data, name=own) for data, own in zip(files, names, strict=True)]
        if len(files) > 1 and combine == "mean":
            outputs = np.stack([query.outputs for query in queries if query.outputs is not None])
            features = np.stack([query.feature for query in queries if query.feature is not None]).astype(np.float32)
            queries = _queries(features.mean(axis=0, keepdims=True), outputs.mean(axis=0, keepdims=True))
        return self.answer(queries, options, 1000 * (time.perf_counter() - started))

    def query_of(self, data: bytes, *, name: str = "the image") -> Query:
        """Code, outputs and feature of an image file. If that content is stored, code and feature are the stored ones.

        Raises:
            BadImage, BadCheckpoint: see `encode_file`.
        """
        return self._with_stored_code(self.encode_file(data, name=name)[1], data)

    def _with_stored_code(self, query: Query, data: bytes) -> Query:
        """The query with the stored code and feature of its content, if the collection has it.

        Another engine may have computed them; with the signs of the code, the content still finds itself first.
        """
        found = self.collection.by_content(hashlib.sha256(data).hexdigest())
        if found is None or query.outputs is None:
            return query
        stored = found[1]
        signs = 2.0 * unpack(stored.code[None], len(query.outputs))[0] - 1
        feature = query.feature if stored.feature is None else stored.feature
        return Query(stored.code, np.abs(query.outputs) * signs.astype(np.float32), feature)

    def search_code(self, code: NDArray[np.uint8], options: SearchOptions) -> Answer:
        """The hits of a packed code (code_size,) of this collection's checkpoint.

        Raises:
            BadConfig: see `search`; or a ranking that needs more than the code.
            BadCodes: the code has another length, or a bit beyond it is set.
        """
        check_codes(code[None], self.collection.n_bits)
        return self.answer([Query(code)], options)

    def search_vectors(self, vectors: Vectors, options: SearchOptions) -> list[Answer]:
        """The hits of each of the vectors (Q, D). A vector that is stored is searched with its stored code.

        Raises:
            BadConfig: see `search`.
            BadDataset: the vectors have another width, or a row is not finite.
            BadCheckpoint: the collection holds images.
        """
        self.check(options)
        started = time.perf_counter()
        queries = self.queries_of(vectors)
        encode_ms = 1000 * (time.perf_counter() - started) / len(vectors)
        return [self.answer([query], options, encode_ms) for query in queries]

    def queries_of(self, vectors: Vectors) -> list[Query]:
        """Code, outputs and feature of each of the vectors (Q, D), see `query_of`.

        Raises:
            BadDataset, BadCheckpoint: see `search_vectors`.
        """
        queries = _queries(*self.vector_encoder.features_and_outputs(vectors))
        rows = as_float32(vectors)
        return [self._with_stored_code(query, row.tobytes()) for query, row in zip(queries, rows, strict=True)]

    def similar(self, image_id: int, options: SearchOptions) -> Answer:
        """The hits of a stored image, including itself if it matches the filter.

        Raises:
            BadConfig: see `search`; or `rank` is "asymmetric", which needs outputs.
            UnknownImage: there is no such image.
        """
        stored = self.collection.code_of(image_id)
        return self.answer([Query(stored.code, feature=stored.feature)], options)

    def check(self, options: SearchOptions, *, stored: bool = False) -> Rank:
        """The ranking that `options` select for an image, or for a stored one.

        Raises:
            BadConfig: the collection does not have what the ranking or `min_precision` needs.
        """
        self._max_distance(options)
        if options.rank == "float" and not self.collection.keeps_features:
            raise BadConfig(
                f"{self.collection.place} stores no features, which the ranking float needs: use "
                f"{'hamming' if stored else 'asymmetric'}, or create a collection with "
                "`hashseek index add --keep-features`"
            )
        if options.rank == "asymmetric" and stored:
            raise BadConfig(
                "the ranking asymmetric needs the real outputs of the query, which are not stored with an image: "
                "search with its file, or rank by hamming"
            )
        return options.rank or ("hamming" if stored else "asymmetric")

    def answer(self, queries: Sequence[Query], options: SearchOptions, encode_ms: float = 0.0) -> Answer:
        """The hits of a query with their records, or of the union of several of the same kind, see `search_files`.

        The histogram is of the first. `encode_ms` is copied into the answer.

        Raises:
            BadConfig: see `search`.
        """
        started, query = time.perf_counter(), queries[0]
        rank = self.check(options, stored=query.outputs is None)
        if rank == "float" and query.feature is None:
            raise BadConfig("the ranking float needs features, which a code does not have: rank by hamming")
        with self._stage("search"):
            distances, ids, scores, is_exact = self._ranked(queries, rank, options)
        with self._stage("records"):
            records = self.collection.get(ids.tolist())
            stored = stored_calibration(self.collection) if len(ids) else None
        hits: list[Hit] = []
        for distance, score, record in zip(distances.tolist(), scores, records, strict=True):
            if record is not None:  # it may have been removed since it was ranked
                relevance = None if stored is None else stored.calibration.at_distance[distance]
                hits.append(Hit(options.offset + len(hits) + 1, distance, record, relevance, score))
        counts = self.collection.histogram(query.code[None], among=options.among) if options.histogram else None
        search_ms = 1000 * (time.perf_counter() - started)
        return Answer(tuple(hits), encode_ms, search_ms, rank, is_exact, len(ids) == options.k, counts)

    def _ranked(self, queries: Sequence[Query], rank: Rank, options: SearchOptions) -> _Ranked:
        """The hits from `options.offset` on."""
        among, max_distance = options.among, self._max_distance(options)
        limits: Limits = {"max_distance": max_distance, "among": among, "effort": options.effort}
        finds_all = among is not None or max_distance is not None or self.collection.finds_all
        if rank != "hamming":
            return self._by_score(queries, rank, options, limits, finds_all)
        codes = np.stack([query.code for query in queries])
        page = slice(options.offset, options.offset + options.k)
        distances, ids = _union(self.collection.search(codes, k=page.stop, **limits))
        return _Ranked(distances[page], ids[page], [None] * len(ids[page]), finds_all)

    def _by_score(
        self, queries: Sequence[Query], rank: Rank, options: SearchOptions, limits: Limits, finds_all: bool
    ) -> _Ranked:
        """Order candidates, nearest codes first, by score within blocks, so that pages neither overlap nor have gaps.

        Every block has at least `size` candidates and ends with a whole distance, wherever a page begins.
        """
        k, offset, size = options.k, options.offset, options.oversample * options.k
        n = offset + k + size if offset else size  # enough to complete the block of the last hit
        candidates = [self.collection.candidates(query.code[None], n=n, **limits) for query in queries]
        distances, ids, codes = _union(candidates)
        n_kept = int(distances.searchsorted(distances[n - 1], "right")) if len(ids) > n else len(ids)
        distances, ids, codes = distances[:n_kept], ids[:n_kept], codes[:n_kept]
        rows, scores = [np.zeros(0, np.int64)], [np.zeros(0)]
        for start, stop in _blocks(distances, size):
            if start < offset + k and stop > offset:
                block = slice(start, stop)
                of_queries = [self._scores(query, rank, codes[block], ids[block]) for query in queries]
                of_block: NDArray[np.float64] = np.maximum.reduce(of_queries)
                chosen = best(of_block, ids[block], offset + k - start)[max(offset - start, 0) :]
                rows.append(start + chosen)
                scores.append(of_block[chosen])
        at = np.concatenate(rows)
        # Whether all images were scored, in one block; counting them takes longest and comes last.
        is_exact = finds_all and len(ids) <= size and (len(ids) < n or len(ids) == len(self.collection))
        return _Ranked(distances[at], ids[at], np.concatenate(scores).tolist(), is_exact)

    def _scores(self, query: Query, rank: Rank, codes: Codes, ids: Ids) -> NDArray[np.float64]:
        """Scores (N,) of images with these codes and ids; a higher score is nearer."""
        if rank == "asymmetric":
            assert query.outputs is not None
            return asymmetric_scores(codes, query.outputs)
        assert query.feature is not None
        return self._cosines(query.feature, ids)

    def _cosines(self, feature: StoredFeatures, ids: Ids) -> NDArray[np.float64]:
        """Cosines (N,) of a feature (D,) with those of stored images; -1 for one that has been removed."""
        scores = np.full(len(ids), -1.0)
        order = np.argsort(ids)
        for start in range(0, len(ids), _FEATURES_AT_ONCE):
            chosen = order[start : start + _FEATURES_AT_ONCE]
            found, features = self.collection.features_of(ids[chosen].tolist())
            scores[chosen[np.searchsorted(ids[chosen], found)]] = cosines(features, feature)
        return scores

    def _max_distance(self, options: SearchOptions) -> int | None:
        if options.min_precision is None:
            return options.max_distance
        return radius_for(stored_calibration(self.collection), options.min_precision)


def open_encoder(
    collection: Store, checkpoint: Path | None = None, **options: Unpack[EncoderOptions]
) -> Encoder | VectorEncoder:
    """The encoder of a collection, from its own checkpoint or another file of the same fingerprint.

    Raises:
        ForeignCodes: the checkpoint did not make the collection's codes.
    """
    source = collection.checkpoint if checkpoint is None else checkpoint
    check_checkpoint(collection, source)
    loaded = load_checkpoint(source)
    is_of_vectors = loaded.header.preprocessing is None  # vectors are encoded in only one way
    return VectorEncoder(loaded) if is_of_vectors else Encoder(loaded, **options)


class _Ranked(NamedTuple):
    """Hits, best first: distances (n,), ids (n,), scores (None if ordered by distance), and whether they are exact."""

    distances: Distances
    ids: Ids
    scores: Sequence[float | None]
    is_exact: bool


def _blocks(distances: Distances, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks of candidates: at least `size`, and all others at the distance of the last of them."""
    start = 0
    while start < len(distances):
        last = distances[min(start + size, len(distances)) - 1]
        stop = int(distances.searchsorted(last, "right"))
        yield start, stop
        start = stop


def _union(found: Sequence[tuple[NDArray[Any], ...]]) -> tuple[NDArray[Any], ...]:
    """Results (distances, ids, ...) of several queries as one: each id once, with its smallest distance."""
    if len(found) == 1:
        return found[0]
    distances, ids, *others = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.lexsort((ids, distances))
    chosen = order[np.sort(np.unique(ids[order], return_index=True)[1])]
    return tuple(part[chosen] for part in (distances, ids, *others))


def _queries(features: NDArray[np.float32], outputs: NDArray[np.float32]) -> list[Query]:
    """A query for each row of features (B, D) and outputs (B, K)."""
    return [Query(*parts) for parts in zip(pack(outputs), outputs, stored_features(features), strict=True)]
