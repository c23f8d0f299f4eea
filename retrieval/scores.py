"""Scores for ranking: the query's real outputs with stored codes, and cosines of features. A higher score is nearer.

Both come from sums in float64 that hardly ever round: features have 11 significant bits, and outputs 24. So a score
depends neither on the other images nor on the processor, and equal codes get equal scores.
"""

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.codes import Codes, check_codes

StoredFeatures = NDArray[np.float16]
Scores = NDArray[np.float64]

# (256, 8): the bits of every byte, -1 or 1
_SIGNS = 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") - 1
_ROWS = 512  # of features at a time, which fit into the caches in float64


def asymmetric_scores(codes: Codes, outputs: NDArray[np.floating]) -> Scores:
    """The sum over all bits of output times stored bit (-1 or 1), for packed codes (N, code_size): (N,).

    It orders codes as the query would without rounding to bits (asymmetric distance; Gordo et al., TPAMI 2014).

    Args:
        codes: the codes of the images.
        outputs: real outputs (K,) of the query.

    Raises:
        BadCodes: the codes do not have K bits.
    """
    check_codes(codes, len(outputs))
    padded = np.zeros((codes.shape[1], 8))
    padded.reshape(-1)[: len(outputs)] = outputs
    scores = np.zeros(len(codes))
    for byte, of_byte in enumerate(padded):
        scores += (_SIGNS * of_byte).sum(axis=1).take(codes[:, byte])  # a table of the 256 sums of 8 bits
    return scores


def stored_features(features: NDArray[np.floating]) -> StoredFeatures:
    """Features (B, D) divided by their length, as they are stored and compared; zeros stay zeros."""
    values = np.asarray(features, np.float64)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return (values / np.where(lengths > 0, lengths, 1)).astype(np.float16)


def cosines(features: StoredFeatures, query: StoredFeatures) -> Scores:
    """Cosines of features (N, D) with those of queries (D,) or (Q, D), all from `stored_features`: (N,) or (Q, N).

    The cosine of equal features is exactly 1, that of zeros 0.
    """
    wanted = query.astype(np.float64)
    squares = np.einsum("...d,...d->...", wanted, wanted)[..., None]
    scores = np.empty((*query.shape[:-1], len(features)))
    for start in range(0, len(features), _ROWS):
        rows = features[start : start + _ROWS].astype(np.float64)
        # For one query, threads of a BLAS library would cost more than they gain.
        products = np.einsum("nd,d->n", rows, wanted) if query.ndim == 1 else wanted @ rows.T
        # Rounding to float16 has changed the lengths, so they are not 1.
        lengths = np.sqrt(squares * np.einsum("nd,nd->n", rows, rows))
        scores[..., start : start + _ROWS] = products / np.where(lengths > 0, lengths, 1)
    return scores


def best(scores: Scores, ids: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """The positions of the k highest scores, highest first, ties by ascending id."""
    places = np.arange(len(scores))
    if len(scores) > 2 * k:
        places = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
    return places[np.lexsort((ids[places], -scores[places]))[:k]]
