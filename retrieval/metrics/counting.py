"""Rankings as histograms: how many items of each gain have each Hamming distance from each query.

One matrix product gives both. The row of an item holds its bits and its labels; the column of a query holds +1 or -1
for each bit and a stride above K for each label. Their product is a key, `distance + stride * shared labels`, which is
exact in float32. A block of keys is counted while it is still in the cache, so the Q x N matrix never exists and
nothing is sorted.

PyTorch is imported when something is counted: a service needs only the types.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import Codes, check_codes, unpack
from hashseek.retrieval.devices import n_cores, pick_device
from hashseek.retrieval.errors import BadCodes

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Labels = NDArray[np.uint8]

# The keys of this many queries and items fit into the second-level cache together with their counts. A GPU wants more.
_QUERIES, _ITEMS = 64, 4096
_ITEMS_ON_GPU = 2**18
# With fewer pairs, threads cost more than they save.
_PAIRS_WORTH_A_THREAD = 2**21


@dataclass(frozen=True)
class Histograms:
    """Rankings of Q queries as counts per Hamming distance.

    `total[q, d]` items are at distance d from query q, and `relevant[q, d]` of them share a label with it, both
    (Q, K + 1). `gains[q, g, d]` of them share exactly g labels, (Q, G + 1, K + 1); None unless `graded=True`.
    """

    total: Counts
    relevant: Counts
    gains: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return int(self.total.shape[0])

    @property
    def n_bits(self) -> int:
        """K."""
        return int(self.total.shape[1]) - 1

    @property
    def n_database(self) -> int:
        """N, the number of items in the database."""
        return int(self.total[0].sum())

    @property
    def n_relevant(self) -> Counts:
        """How many items of the database are relevant to each query, (Q,); without any, a query scores 0."""
        result: Counts = self.relevant.sum(axis=1)
        return result


def histograms(
    query_codes: Codes,
    database_codes: Codes,
    query_labels: Labels,
    database_labels: Labels,
    *,
    n_bits: int,
    graded: bool = False,
    device: str = "cpu",
) -> Histograms:
    """Count the items of each gain at each distance from each query.

    Args:
        query_codes: packed (Q, code_size).
        database_codes: packed (N, code_size).
        query_labels: 0/1 (Q, C).
        database_labels: 0/1 (N, C).
        n_bits: K.
        graded: keep the counts per number of shared labels, which nDCG, ACG and WAP need.
        device: "cpu", "auto", "cuda" or "cuda:N"; all give the same counts.

    Raises:
        BadCodes: there are no codes, shapes do not match, or labels are not 0/1.
        BadConfig: the device does not exist.
    """
    check_codes(query_codes, n_bits)
    check_codes(database_codes, n_bits)
    _check_labels(query_codes, query_labels, "query")
    _check_labels(database_codes, database_labels, "database")
    check_same_labels(query_labels, database_labels)
    where = pick_device(device)
    most = min(int(labels.sum(axis=1, dtype=np.int64).max()) for labels in (query_labels, database_labels))
    counts = np.zeros((len(query_codes), most + 1, n_bits + 1), np.int32)

    def count(rows: NDArray[np.int64]) -> None:
        own = query_codes[rows], query_labels[rows]
        counts[rows] = _count(*own, database_codes, database_labels, n_gains=most + 1, n_bits=n_bits, device=where)

    n_threads = 1 if where.type != "cpu" else min(n_cores(), len(query_codes))
    if n_threads == 1 or len(query_codes) * len(database_codes) < _PAIRS_WORTH_A_THREAD:
        count(np.arange(len(query_codes)))
    else:
        import torch

        # Each of these threads works on its own queries, so torch must not start further threads inside them.
        before = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                list(pool.map(count, np.array_split(np.arange(len(query_codes)), n_threads)))
        finally:
            torch.set_num_threads(before)
    total = counts.sum(axis=1, dtype=np.int64)
    return Histograms(total, total - counts[:, 0], counts if graded else None)


def without_self(found: Histograms, query_labels: Labels) -> Histograms:
    """The histograms without the query itself, for queries that are items of the database: one less at distance 0.

    Args:
        found: histograms of queries that are in the database exactly once.
        query_labels: 0/1 (Q, C), as given to `histograms`.

    Raises:
        BadCodes: a query has no item at distance 0 with all its labels, so it is not in the database.
    """
    n_labels = query_labels.sum(axis=1, dtype=np.int64)
    own = np.arange(len(found))
    total, relevant = found.total.copy(), found.relevant.copy()
    gains = None if found.gains is None else found.gains.copy()
    total[:, 0] -= 1
    relevant[:, 0] -= n_labels > 0
    if gains is not None:
        known = n_labels < gains.shape[1]  # more labels than any item of the database shares
        gains[own[known], n_labels[known], 0] -= 1
        total[~known, 0] = -1
    if (total[:, 0] < 0).any() or (relevant < 0).any() or (gains is not None and (gains < 0).any()):
        raise BadCodes("a query is not in the database, so it cannot be removed from its own ranking")
    return Histograms(total, relevant, gains)


def _check_labels(codes: Codes, labels: Labels, split: str) -> None:
    """Raise `BadCodes` unless there is at least one code, and a row of 0/1 labels for each."""
    if not len(codes):
        raise BadCodes(f"the {split} split is empty: there is nothing to evaluate")
    if labels.ndim != 2 or len(labels) != len(codes):
        raise BadCodes(f"{len(codes)} {split} codes need labels of shape ({len(codes)}, C), not {labels.shape}")
    if labels.size and (labels.min() < 0 or labels.max() > 1):
        raise BadCodes(f"{split} labels must be 0 or 1, but range from {labels.min()} to {labels.max()}")


def check_same_labels(query_labels: Labels, database_labels: Labels) -> None:
    """Raise `BadCodes` unless queries and database have the same number of labels."""
    if query_labels.shape[1] != database_labels.shape[1]:
        raise BadCodes(
            f"query labels have {query_labels.shape[1]} columns, database labels {database_labels.shape[1]}: "
            "use the same label names for both"
        )


def _count(
    query_codes: Codes,
    query_labels: Labels,
    database_codes: Codes,
    database_labels: Labels,
    *,
    n_gains: int,
    n_bits: int,
    device: torch.device,
) -> NDArray[np.int32]:
    """Counts (q, gains, K + 1): one block of items after the other, each against all queries."""
    import torch

    # Also exact in bfloat16, which some systems use for products of float32 (DNNL_DEFAULT_FPMATH_MODE=BF16).
    stride = 8 * (n_bits // 8 + 1)
    on_cpu, n_keys = device.type == "cpu", n_gains * stride
    # Counting a block also costs its number of bins, so blocks must not be shorter. Float32 is exact below 2**24.
    n_items = max(_ITEMS if on_cpu else _ITEMS_ON_GPU, 4 * n_keys)
    n_queries = max(1, min(max(8, _QUERIES * _ITEMS // n_items if on_cpu else _QUERIES), 2**23 // n_keys))
    blocks = []
    for start in range(0, len(query_codes), n_queries):
        chosen = slice(start, start + n_queries)
        bits, labels = (
            part.T.astype(np.float32) for part in (unpack(query_codes[chosen], n_bits), query_labels[chosen])
        )
        columns = torch.from_numpy(np.concatenate((1 - 2 * bits, stride * labels)))
        first_keys = torch.from_numpy(bits.sum(axis=0)) + n_keys * torch.arange(bits.shape[1])
        blocks.append((columns.to(device), first_keys.to(device)))
    counts = [torch.zeros(len(first_keys) * n_keys, dtype=torch.int64, device=device) for _, first_keys in blocks]
    for start in range(0, len(database_codes), n_items):
        chosen = slice(start, start + n_items)
        rows = np.concatenate((unpack(database_codes[chosen], n_bits), database_labels[chosen]), axis=1)
        items = torch.from_numpy(rows).to(device).float()
        for (columns, first_keys), sums in zip(blocks, counts, strict=True):
            # Keys are ordered by item, then query: neighbours go to different bins and do not wait for each other.
            keys = torch.addmm(first_keys, items, columns).to(torch.int32)
            sums += torch.bincount(keys.view(-1), minlength=len(sums))
    parts = [sums.to(torch.int32).cpu().numpy().reshape(-1, n_gains, stride) for sums in counts]
    return np.concatenate(parts)[:, :, : n_bits + 1]
