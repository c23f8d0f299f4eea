"""The margin zeta of HyP2: how far apart C proxies of K bits can be pushed.

A binary linear code of length n and dimension k has a largest minimum distance d(n, k). With k = ceil(log2 C) there
is room for C codewords, and two of them are at least d bits apart, that is, their cosine is at most 1 - 2 d / n.
`min_distance.csv` (columns n, k, d) holds the exact optimum for n <= 256 and k <= 8, where Brouwer's bounds close.
Source: Xu et al., "HyP2 Loss: Beyond Hypersphere Metric Space for Multi-label Image Retrieval", ACM MM 2022, sec. 3.
"""

import csv
from functools import cache
from importlib import resources

from hashseek.retrieval.errors import BadConfig

MAX_BITS = 256
MAX_CLASSES = 256


def zeta(n_bits: int, n_classes: int) -> float:
    """zeta(K, C) = 1 - 2 d / K, where d is the minimum distance of the best [K, ceil(log2 C)] code.

    A single class needs no code; k = 1 is used, that is zeta = -1.

    Raises:
        BadConfig: K or C is outside the exact table; set `zeta` explicitly.
    """
    if n_classes > MAX_CLASSES:
        raise BadConfig(
            f"zeta is known exactly for at most {MAX_CLASSES} labels, got {n_classes}: set the hyperparameter "
            "zeta, between -1 and 1"
        )
    if n_bits > MAX_BITS:
        raise BadConfig(
            f"zeta is tabulated for at most {MAX_BITS} bits, got {n_bits}: set the hyperparameter zeta, "
            "between -1 and 1, or choose a shorter code"
        )
    dimension = max(1, (n_classes - 1).bit_length())
    if n_bits < dimension:
        raise BadConfig(
            f"{n_bits} bits cannot tell {n_classes} labels apart: use at least {dimension} bits "
            "or set the hyperparameter zeta, between -1 and 1"
        )
    return 1 - 2 * _min_distances()[n_bits, dimension] / n_bits


@cache
def _min_distances() -> dict[tuple[int, int], int]:
    table = resources.files("hashseek.training.losses.hashing").joinpath("min_distance.csv")
    rows = csv.DictReader(table.read_text(encoding="utf-8").splitlines())
    return {(int(row["n"]), int(row["k"])): int(row["d"]) for row in rows}
