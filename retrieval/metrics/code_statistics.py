"""Statistics of the codes themselves: how far apart the classes are, and how well the bits are used."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import Codes, check_codes, unpack
from hashseek.retrieval.errors import BadCodes
from hashseek.retrieval.metrics.counting import Histograms

# Codes per block; a block is unpacked into floats.
_ROWS = 2**16


@dataclass(frozen=True)
class ClassDistances:
    """Mean Hamming distance in bits of pairs that share a label (`intra`) and of all other pairs (`inter`).

    NaN where there is no such pair.
    """

    intra: float
    inter: float


def class_distances(found: Histograms) -> ClassDistances:
    """d_intra and d_inter over all (query, item) pairs; each pair counts once.

    HyP2 (Xu et al., MM 2022) reports d_intra and d_inter in its Table 6, but states no formula, and its code computes
    neither. This is our reading: relevant pairs are within a class, all others are between classes.
    """
    distances = np.arange(found.n_bits + 1)
    relevant = found.relevant.sum(axis=0)
    irrelevant = found.total.sum(axis=0) - relevant
    intra, inter = (
        float(counts @ distances / counts.sum()) if counts.sum() else float("nan") for counts in (relevant, irrelevant)
    )
    return ClassDistances(intra, inter)


@dataclass(frozen=True)
class BitStatistics:
    """How the bits of n codes are used.

    `balance` (K,): the share of ones in each bit; 0.5 is best. `n_constant`: bits that never change.
    `mean_correlation`, `max_correlation`: absolute Pearson correlation of pairs of bits that do change (0 if there is
    no such pair). `n_distinct`: number of distinct codes; `most_common`: how often the most frequent code occurs.
    `quantisation_error`: mean of (|u| - 1)**2 over all outputs u, the square quantisation error; `quantisation_angle`:
    1 - mean cosine between outputs and their signs, which does not depend on the outputs' scale. None without outputs.
    """

    balance: tuple[float, ...]
    n_constant: int
    mean_correlation: float
    max_correlation: float
    n_distinct: int
    most_common: int
    quantisation_error: float | None = None
    quantisation_angle: float | None = None


def bit_statistics(codes: Codes, *, n_bits: int, outputs: NDArray[np.floating] | None = None) -> BitStatistics:
    """Statistics of packed codes (n, code_size) and, if given, of the real outputs (n, K) whose signs they are.

    Raises:
        BadCodes: no codes, or outputs of the wrong shape.
    """
    check_codes(codes, n_bits)
    if not len(codes):
        raise BadCodes("bit statistics need at least one code")
    if outputs is not None and outputs.shape != (len(codes), n_bits):
        raise BadCodes(
            f"{len(codes)} codes of {n_bits} bits need outputs of shape {(len(codes), n_bits)}, not {outputs.shape}"
        )
    ones, both = np.zeros(n_bits), np.zeros((n_bits, n_bits))
    for start in range(0, len(codes), _ROWS):
        bits = unpack(codes[start : start + _ROWS], n_bits).astype(np.float32)  # float32 counts exactly up to 2**24
        ones += bits.sum(axis=0, dtype=np.float64)
        both += bits.T @ bits
    balance = ones / len(codes)
    covariance = both / len(codes) - np.outer(balance, balance)
    varies = (ones > 0) & (ones < len(codes))
    deviation = np.sqrt(np.diag(covariance)[varies])
    correlation = np.abs(covariance[np.ix_(varies, varies)] / np.outer(deviation, deviation))
    pairs = correlation[np.triu_indices(len(correlation), 1)]
    counts = np.unique(codes, axis=0, return_counts=True)[1]
    error = angle = None
    if outputs is not None:
        size = np.abs(outputs)
        error = float(np.mean((size - 1) ** 2, dtype=np.float64))
        length = np.linalg.norm(outputs, axis=1) * np.sqrt(n_bits)
        angle = 1 - float(np.mean(size.sum(axis=1) / np.where(length > 0, length, 1), dtype=np.float64))
    return BitStatistics(
        balance=tuple(balance.tolist()),
        n_constant=int((~varies).sum()),
        mean_correlation=float(pairs.mean()) if len(pairs) else 0.0,
        max_correlation=min(1.0, float(pairs.max())) if len(pairs) else 0.0,
        n_distinct=len(counts),
        most_common=int(counts.max()),
        quantisation_error=error,
        quantisation_angle=angle,
    )
