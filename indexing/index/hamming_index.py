"""Search over packed codes by Hamming distance: one interface, several kinds.

    exact         every code is compared, in one of two arrangements that `build_index` chooses between (the default)
    multi-index   few codes are compared, looked up in tables, see `hashseek.indexing.index.multi_index`
    gpu           every code is compared, on a GPU
    ivf, hnsw     inverted lists and a graph of neighbours, see `hashseek.indexing.index.approximate`

The first three find what brute force finds, ties by ascending id, for every K and every k. Approximate kinds report the
recall that was measured when they were built; `range` is exact in every kind, and so is `search` among few images.
"""

import io
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.index.approximate import (
    APPROXIMATE,
    Approximate,
    default_effort,
    measure_recall,
    search_structure,
)
from hashseek.indexing.index.code_layouts import DistinctCodes, PlainCodes, Subset, arrange
from hashseek.indexing.index.exact_scan import Distances, Rows, nearest, padded_size, suits_nearest
from hashseek.indexing.index.gpu import Gpu, to_gpu
from hashseek.indexing.index.multi_index import Tables, build_tables
from hashseek.retrieval.codes import Codes, check_codes, code_size, pad
from hashseek.retrieval.errors import BadCodes, BadCollection, BadConfig
from hashseek.retrieval.files import write_atomically

Ids = NDArray[np.int64]

SLOW_TO_BUILD = ("multi-index", *APPROXIMATE)
"""Kinds that are rebuilt only after many changes, and then written at once."""
KINDS = ("exact", "multi-index", "gpu", *APPROXIMATE)
# The arrays of an index: its ids, those of `PlainCodes` or `DistinctCodes`, and those of `Tables`.
_TYPES: Mapping[str, type[np.generic]] = {
    "ids": np.int64,
    "codes": np.uint8,
    "distinct": np.uint8,
    "starts": np.int64,
    "rows": np.uint32,
    "table_rows": np.uint32,
    "table_starts": np.uint32,
}
# Files of at least this many bytes are mapped, so that opening is fast. Others are read: searches are a little faster.
MAPPED = 256 * 2**20
# If at least this share of the rows may be found, an approximate kind fetches more than k results and leaves out the
# others; for fewer, all rows that may be found are compared.
_MOST = 0.9
# From one id in this many images on, marking them in a table of all ids is faster than looking each of them up.
_MANY = 20


@dataclass(frozen=True)
class HammingIndex:
    """Codes with their ids, read-only once built. Safe to use from several threads.

    `ids` ascend, so that the order of ties by row is the order by id.
    """

    n_bits: int
    ids: Ids
    rows: PlainCodes | DistinctCodes
    kind: str
    approximate: Approximate | None = None
    recall: Mapping[int, float] = field(default_factory=dict)
    gpu: Gpu | None = None
    tables: Tables | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def codes(self) -> Codes:
        """Packed codes (N, code_size), in the order of `ids`."""
        return np.ascontiguousarray(self.rows.codes[:, : code_size(self.n_bits)])

    @property
    def n_bytes(self) -> int:
        """Bytes of main memory for codes, ids, tables and the structure of an approximate kind."""
        others = sum(part.n_bytes for part in (self.approximate, self.tables) if part is not None)
        return self.ids.nbytes + self.rows.n_bytes + others

    def subset_of(self, ids: Ids) -> Subset:
        """The rows of these ids, in any order; unknown ids are ignored."""
        ids = np.asarray(ids, np.int64)
        if not len(self):
            return Subset(np.zeros(0, np.bool_))
        first, span = self.ids[0], int(self.ids[-1] - self.ids[0]) + 1
        if _MANY * len(ids) > len(self) and span < 8 * len(self):  # faster than looking up each of them
            chosen = np.zeros(span, np.bool_)
            chosen[ids[(ids >= first) & (ids <= self.ids[-1])] - first] = True
            return Subset(chosen[self.ids - first])
        mask = np.zeros(len(self), np.bool_)
        mask[self.rows_of(ids)] = True
        return Subset(mask)

    def rows_of(self, ids: Ids) -> NDArray[np.int64]:
        """The rows of these ids, in their order; unknown ids are left out."""
        at = np.searchsorted(self.ids, ids)
        inside = at < len(self)
        rows: NDArray[np.int64] = at[inside][self.ids[at[inside]] == ids[inside]]
        return rows

    def search(
        self, query_codes: Codes, *, k: int, among: Subset | None = None, effort: int | None = None
    ) -> tuple[Distances, Ids]:
        """The k nearest: (distances, ids), each (Q, min(k, number that may be found)), nearest first, ties by id.

        Args:
            query_codes: packed (Q, code_size).
            k: results per query, at least 1.
            among: rows that may be found; None: all.
            effort: for approximate kinds; a higher effort is slower and misses less (`recall` lists some values). None:
                the lowest that had a good recall on a sample when the index was built.

        Raises:
            BadCodes: queries of another width.
            BadConfig: an effort outside the limits of an approximate kind; other kinds ignore it.
        """
        xq = self._padded(query_codes)
        if among is not None and among.n == len(self):
            among = None
        k = min(k, len(self) if among is None else among.n)
        if k == 0 or not len(xq):
            return np.zeros((len(xq), k), np.int32), np.zeros((len(xq), k), np.int64)
        if self.approximate is not None and (among is None or among.n >= _MOST * len(self)):
            effort = default_effort(self.recall) if effort is None else effort
            distances, rows = self._search_approximately(self.approximate, xq, k, among, effort)
        elif (on_gpu := self._search_on_gpu(xq, k, among)) is not None:
            distances, rows = on_gpu
        elif self._suits_nearest(xq, k) and among is None:
            distances, rows = nearest(xq, self.rows.compared, k=k)
        else:
            distances, rows = self._scan(xq, k, among)
        return distances, self.ids[rows]

    def range(
        self,
        query_codes: Codes,
        *,
        radius: int,
        k: int | None = None,
        among: Subset | None = None,
        ties: bool = False,
    ) -> list[tuple[Distances, Ids]]:
        """Everything within `radius` bits, inclusive: (distances, ids) for each query, nearest first, ties by id.

        Exact in every kind. With `k`, at most the k nearest of them; with `ties`, also all at the distance of the k-th.

        Raises:
            BadCodes: queries of another width.
        """
        xq = self._padded(query_codes)
        if among is not None and among.n == len(self):
            among = None
        k = len(self) if k is None else min(k, len(self))
        if k == 0 or (among is not None and among.n == 0):
            return [(np.zeros(0, np.int32), np.zeros(0, np.int64)) for _ in xq]
        limit = min(radius, self.n_bits)
        found = self.rows.search(xq, k=k, limit=limit, among=among, ties=ties, tables=self.tables)
        return [(distances, self.ids[rows]) for distances, rows in found]

    def search_ties(
        self, query_codes: Codes, *, k: int, among: Subset | None = None, effort: int | None = None
    ) -> list[tuple[Distances, Ids]]:
        """The k nearest and all others at the distance of the k-th, otherwise as `search`: (distances, ids) per query.

        Of approximate kinds, those among the 2k nearest that the structure finds.
        """

        def scan(queries: Codes) -> list[tuple[Distances, Ids]]:
            return self.range(queries, radius=self.n_bits, k=k, among=among, ties=True)

        if self.approximate is None and self.gpu is None:
            return scan(query_codes)
        results = []
        found = self.search(query_codes, k=2 * k, among=among, effort=effort)
        for row, (distances, ids) in enumerate(zip(*found, strict=True)):
            n = int(distances.searchsorted(distances[k - 1], "right")) if len(distances) > k else len(distances)
            # The GPU returned no further ones at this distance, so there may be more.
            is_cut = self.gpu is not None and n == len(distances) < (len(self) if among is None else among.n)
            results.append(scan(query_codes[row : row + 1])[0] if is_cut else (distances[:n], ids[:n]))
        return results

    def histogram(self, query_code: Codes, *, among: Subset) -> NDArray[np.int64]:
        """How many of the rows `among` have each distance 0 to K from a packed code (1, code_size): (K + 1,)."""
        return self.rows.histogram(self._padded(query_code), among)[: self.n_bits + 1]

    def codes_of(self, ids: Ids) -> Codes:
        """Packed codes (n, code_size) of ids that the index has."""
        return self.rows.gather(np.searchsorted(self.ids, ids))[:, : code_size(self.n_bits)]

    def describe(self) -> dict[str, Any]:
        """Kind, arrangement, sizes and measured recall."""
        collapsed = isinstance(self.rows, DistinctCodes)
        content: dict[str, Any] = {
            "kind": self.kind,
            "arrangement": "distinct codes with lists of images" if collapsed else "one code per image",
            "codes_compared": len(self.rows.compared),
            "padded_bits": 8 * padded_size(self.n_bits),
            "bytes": self.n_bytes,
        }
        if self.approximate is not None:
            content |= self.approximate.describe()
            content |= {f"recall@10 at effort {effort}": round(value, 3) for effort, value in self.recall.items()}
            content["default_effort"] = default_effort(self.recall)
        return content

    def _padded(self, query_codes: Codes) -> Codes:
        return pad(check_codes(query_codes, self.n_bits), padded_size(self.n_bits))

    def _suits_nearest(self, xq: Codes, k: int) -> bool:
        plain = self.tables is None and isinstance(self.rows, PlainCodes)
        return plain and suits_nearest(xq, self.rows.compared, k)

    def _scan(self, xq: Codes, k: int, among: Subset | None) -> tuple[Distances, Rows]:
        """(distances (Q, k), rows (Q, k)), exactly."""
        found = self.rows.search(xq, k=k, limit=self.n_bits, among=among, tables=self.tables)
        distances, rows = zip(*found, strict=True)
        return np.stack(distances), np.stack(rows)

    def _search_on_gpu(self, xq: Codes, k: int, among: Subset | None) -> tuple[Distances, Rows] | None:
        """(distances (Q, k), rows (Q, k)); None if this search must run, or is faster, on the CPU."""
        if self.gpu is None or (among is not None and among.is_small):
            return None
        return self.gpu.search(xq, k=k, usable=None if among is None else among.mask)

    def _search_approximately(
        self, approximate: Approximate, xq: Codes, k: int, among: Subset | None, effort: int
    ) -> tuple[Distances, Rows]:
        """(distances (Q, k), rows (Q, k)); a query for which the structure finds fewer than k rows is scanned."""
        asked = k if among is None else min(len(self), k + 16 + k // 4)
        distances, rows = search_structure(approximate, xq, k=asked, effort=effort)
        usable = rows >= 0
        if among is not None:
            usable &= among.mask[rows]
        # Graphs and lists return equally near rows in an arbitrary order.
        order = np.lexsort((rows, distances, ~usable))[:, :k]
        distances, rows = np.take_along_axis(distances, order, 1), np.take_along_axis(rows, order, 1)
        few = np.flatnonzero(usable.sum(axis=1) < k)
        if len(few):
            distances[few], rows[few] = self._scan(xq[few], k, among)
        return distances, rows


def build_index(codes: Codes, ids: Ids, *, n_bits: int, kind: str = "exact") -> HammingIndex:
    """Index packed codes (N, code_size) under strictly ascending ids (N,).

    Codes are stored one per image, or each distinct code once with a list of images, whichever is searched faster.

    Raises:
        BadCodes: codes of another width, or ids that do not ascend.
        BadConfig: an unknown kind, or gpu without a GPU.
    """
    check_kind(kind)
    check_codes(codes, n_bits)
    if len(ids) != len(codes) or (ids[1:] <= ids[:-1]).any():
        raise BadCodes(f"{len(codes)} codes need {len(codes)} strictly ascending ids, one each")
    ids = np.ascontiguousarray(ids, dtype=np.int64)
    padded = pad(codes, padded_size(n_bits))
    rows = arrange(padded)
    if kind == "multi-index" and len(ids):
        return HammingIndex(n_bits, ids, rows, kind, tables=build_tables(rows.compared, n_bits))
    if kind not in APPROXIMATE or not len(ids):
        return HammingIndex(n_bits, ids, rows, kind, gpu=to_gpu(padded) if kind == "gpu" else None)
    structure = APPROXIMATE[kind].build(padded)
    return HammingIndex(n_bits, ids, rows, kind, structure, measure_recall(structure, rows, n_bits=n_bits))


def save_index(index: HammingIndex, folder: Path) -> list[Path]:
    """Write the index and return its files, each written atomically: raw arrays, and the structure of its kind."""
    arrays = {"ids": index.ids, **vars(index.rows), **(vars(index.tables) if index.tables is not None else {})}
    files = {f"{name}.bin": array for name, array in arrays.items() if name in _TYPES}
    for name, array in files.items():
        write_atomically(folder / name, memoryview(array.reshape(-1)).cast("B") if array.size else b"")
    paths = [folder / name for name in files]
    if index.approximate is not None:
        content = io.BytesIO()
        recall = {"efforts": np.array(list(index.recall)), "recall": np.array(list(index.recall.values()))}
        np.savez(content, allow_pickle=False, faiss=index.approximate.to_array(), **recall)
        paths.append(folder / f"{index.kind}.npz")
        write_atomically(paths[-1], content.getvalue())
    return paths


def load_index(files: Collection[Path], *, n_bits: int, kind: str = "exact") -> HammingIndex:
    """Read the files that `save_index` returned; large ones are mapped into memory.

    Raises:
        BadCollection: a file is missing, or the files do not make up such an index.
        BadConfig: an unknown kind, or gpu without a GPU.
    """
    check_kind(kind)
    path = {file.stem: file for file in files}
    try:
        arrays = {name: _read(path[name], type_) for name, type_ in _TYPES.items() if name in path}
        ids, size = arrays.pop("ids"), padded_size(n_bits)
        rows: PlainCodes | DistinctCodes
        if "codes" in arrays:
            rows = PlainCodes(arrays["codes"].reshape(-1, size))
        else:
            rows = DistinctCodes(arrays["distinct"].reshape(-1, size), arrays["starts"], arrays["rows"])
        if len(rows) != len(ids) or (isinstance(rows, DistinctCodes) and len(rows.starts) != len(rows.distinct) + 1):
            raise ValueError(f"they hold {len(rows)} codes of {n_bits} bits for {len(ids)} images")
        if kind == "multi-index" and len(ids):
            tables = Tables(n_bits, arrays["table_rows"].reshape(-1, len(rows.compared)), arrays["table_starts"])
            return HammingIndex(n_bits, ids, rows, kind, tables=tables)
        if kind not in APPROXIMATE or not len(ids):
            return HammingIndex(n_bits, ids, rows, kind, gpu=to_gpu(rows.codes) if kind == "gpu" else None)
        with path[kind].open("rb") as file, np.load(file, allow_pickle=False) as stored:
            recall = dict(zip(stored["efforts"].tolist(), stored["recall"].tolist(), strict=True))
            structure = APPROXIMATE[kind].from_array(stored["faiss"])
            return HammingIndex(n_bits, ids, rows, kind, structure, recall)
    # SystemError: Python 3.11 raises it where several threads parse literals at once, as NumPy does with headers.
    except (RuntimeError, SystemError, OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise BadCollection(f"the index files cannot be read: {error}") from None


def _read(path: Path, type_: type[np.generic]) -> NDArray[Any]:
    """The numbers in a file, read, or if there are many, mapped."""
    if path.stat().st_size < MAPPED:
        return np.fromfile(path, type_)
    return np.asarray(np.memmap(path, type_, mode="r"))


def check_kind(kind: str) -> None:
    """Raise `BadConfig` unless the kind is one of `KINDS`."""
    if kind not in KINDS:
        raise BadConfig(f"there is no index of kind {kind!r}: use one of {', '.join(KINDS)}")
