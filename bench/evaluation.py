"""Time of the exact, tie-aware evaluation beside a per-query NumPy evaluation as the toolboxes write it.

    make bench-eval            # or: python bench/evaluation.py [Q N K C]

Random codes and labels of the size of NUS-WIDE: 2,100 queries x 183,234 codes of 48 bits, 21 labels, mAP@5000.
"""

import sys
import time

import numpy as np

from indexing.searcher import InMemory
from retrieval.codes import pack
from retrieval.devices import n_cores
from retrieval.metrics import average_precision, average_precision_of_ranking, histograms, precision, relevance


def per_query(query: np.ndarray, database: np.ndarray, lq: np.ndarray, lb: np.ndarray, n: int) -> float:
    """MAP@n over +-1 codes by a matrix product, an argsort and a loop, as DeepHash-pytorch and HashNet do it."""
    total = 0.0
    for code, labels in zip(query, lq, strict=True):
        relevant = (labels @ lb.T > 0).astype(np.float32)
        distance = 0.5 * (code.shape[0] - code @ database.T)
        relevant = relevant[np.argsort(distance)][:n]
        hits = int(relevant.sum())
        if hits:
            ranks = np.flatnonzero(relevant) + 1.0
            total += float(np.mean(np.arange(1, hits + 1) / ranks))
    return total / len(query)


def main() -> None:
    n_queries, n_database, n_bits, n_labels = (
        (int(v) for v in sys.argv[1:5]) if len(sys.argv) > 4 else (2100, 183_234, 48, 21)
    )
    rng = np.random.default_rng(0)
    outputs_q = rng.standard_normal((n_queries, n_bits), dtype=np.float32)
    outputs_b = rng.standard_normal((n_database, n_bits), dtype=np.float32)
    lq = (rng.random((n_queries, n_labels)) < 0.1).astype(np.uint8)
    lb = (rng.random((n_database, n_labels)) < 0.1).astype(np.uint8)
    xq, xb = pack(outputs_q), pack(outputs_b)
    print(f"{n_queries} queries x {n_database} codes, {n_bits} bits, {n_labels} labels, mAP@5000, {n_cores()} cores")
    ours = []
    for _ in range(3):
        started = time.perf_counter()
        found = histograms(xq, xb, lq, lb, n_bits=n_bits)
        value = average_precision(found, n=5000).expected.mean()
        precision(found, n=5000)
        ours.append(time.perf_counter() - started)
    print(f"hashseek   {np.median(ours):6.2f} s   mAP@5000 {value:.5f} (expected over ties), precision@5000 and bounds")
    started = time.perf_counter()
    index = InMemory(xb, n_bits=n_bits)
    ids = np.stack([row for _, row in index.search(xq, k=min(5000, n_database))])
    value = average_precision_of_ranking(relevance(ids, lq, lb), n_relevant=found.relevant.sum(axis=1)).mean()
    served = time.perf_counter() - started
    print(f"as served  {served:6.2f} s   mAP@5000 {value:.5f} (the index's own ranking, ties by ascending id)")
    few = max(1, n_queries // 20)  # the toolbox's time is the same for every query
    started = time.perf_counter()
    value = per_query(
        np.sign(outputs_q[:few]), np.sign(outputs_b), lq[:few].astype(np.float32), lb.astype(np.float32), 5000
    )
    theirs = (time.perf_counter() - started) * n_queries / few
    print(
        f"per query  {theirs:6.2f} s   mAP@5000 {value:.5f} (ties as argsort leaves them; {few} queries timed, scaled)"
    )
    print(f"ratio      {theirs / np.median(ours):6.1f}")


if __name__ == "__main__":
    main()
