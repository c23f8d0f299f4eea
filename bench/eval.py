"""Time and memory of the exact, tie-aware evaluation, compared with a per-query NumPy evaluation as in other toolboxes.

    make bench-eval                                       # both sizes below
    make bench-eval ARGS="2100 183234 48 21"              # Q N K C; K is a multiple of 8

mAP@5000, the Top-N precision curve up to 5,000 and nDCG@5000 of random codes and labels of NUS-WIDE's size (2,100
queries x 183,234 codes of 48 bits, 21 labels), then ours alone on 5,000 x 1,000,000 codes of 64 bits. Ours computes the
expectation over ties with the worst and the best order; the per-query evaluation breaks ties like argsort. If there
is a GPU, the histograms are also counted there.
"""

import gc
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hashseek.retrieval.codes import unpack
from hashseek.retrieval.devices import n_cores
from hashseek.retrieval.metrics import average_precision, histograms, ndcg, precision_curve

N = 5000
CURVE = range(100, N + 1, 100)
SIZES = ((2100, 183_234, 48, 21), (5000, 1_000_000, 64, 21))


def per_query(query: np.ndarray, database: np.ndarray, lq: np.ndarray, lb: np.ndarray, n: int) -> tuple[float, ...]:
    """Mean AP, precision and nDCG@n of +-1 codes as in DeepHash-pytorch and HashNet: product and argsort."""
    discounts = 1 / np.log2(np.arange(2, n + 2))
    curve, ap, ndcgs = np.zeros(n), 0.0, 0.0
    for code, labels in zip(query, lq, strict=True):
        gains = labels @ lb.T
        distance = 0.5 * (code.shape[0] - code @ database.T)
        top = gains[np.argsort(distance)][:n]
        relevant = top > 0
        hits = int(relevant.sum())
        if hits:
            ap += float(np.mean(np.arange(1, hits + 1) / (np.flatnonzero(relevant) + 1.0)))
        curve += np.cumsum(relevant) / np.arange(1, n + 1)
        ideal = np.sort(gains)[::-1][:n]
        best = float(((2**ideal - 1) * discounts).sum())
        ndcgs += float(((2**top - 1) * discounts).sum()) / best if best else 0.0
    return ap / len(query), float(curve[-1]) / len(query), ndcgs / len(query)


def ours(sets: tuple[np.ndarray, ...], *, n_bits: int, device: str) -> tuple[float, ...]:
    found = histograms(*sets, n_bits=n_bits, graded=True, device=device)
    figures = average_precision(found, n=N), precision_curve(found, CURVE), ndcg(found, n=N)
    return figures[0].expected.mean(), figures[1].expected[:, -1].mean(), figures[2].expected.mean()


def random_sets(n_queries: int, n_database: int, n_bits: int, n_labels: int) -> tuple[np.ndarray, ...]:
    """Query codes, database codes, query labels, database labels: random bits, each label on a tenth of the images."""
    rng = np.random.default_rng(0)
    codes, labels = [], []
    for n in (n_queries, n_database):
        codes.append(rng.integers(0, 256, (n, n_bits // 8), np.uint8))
        labels.append((rng.random((n, n_labels), np.float32) < 0.1).astype(np.uint8))
    return *codes, *labels


def measure(work: Callable[[], Any], *, times: int = 1) -> tuple[float, float, Any]:
    """(median seconds, peak memory of the process in GiB, result)."""
    gc.collect()
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")  # forget the peak so far
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - started)
    if clear.exists():
        peak = int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return float(np.median(seconds)), peak, result


def report(name: str, seconds: float, peak: float, values: tuple[float, ...], remark: str) -> None:
    shown = "  ".join(f"{value:.5f}" for value in values)
    print(f"{name:<12}{seconds:8.2f} s {peak:7.2f} GiB   {shown}   {remark}", flush=True)


def run(n_queries: int, n_database: int, n_bits: int, n_labels: int, *, alone: bool) -> None:
    xq, xb, lq, lb = sets = random_sets(n_queries, n_database, n_bits, n_labels)
    print(
        f"\n{n_queries} queries x {n_database} codes, {n_bits} bits, {n_labels} labels, {n_cores()} cores\n"
        f"                time  peak memory   mAP@{N}  precision@{N}  nDCG@{N}"
    )
    seconds, peak, values = measure(lambda: ours(sets, n_bits=n_bits, device="cpu"), times=1 if alone else 5)
    report("hashseek", seconds, peak, values, "expected over ties; worst and best order, curve at 50 N")
    if torch.cuda.is_available():
        ours(sets, n_bits=n_bits, device="cuda")  # starts the device
        gpu, peak, values = measure(lambda: ours(sets, n_bits=n_bits, device="cuda"), times=5)
        report("on the GPU", gpu, peak, values, torch.cuda.get_device_name())
    if alone:
        return

    few = max(1, n_queries // 20)  # the toolbox's time is the same for every query
    signs = [unpack(codes, n_bits) * np.float32(2) - 1 for codes in (xq[:few], xb)]
    floats = [labels.astype(np.float32) for labels in (lq[:few], lb)]
    part, peak, values = measure(lambda: per_query(*signs, *floats, min(N, n_database)))
    theirs = part * n_queries / few
    report("per query", theirs, peak, values, f"ties as argsort leaves them; {few} queries timed, scaled")
    print(f"ratio       {theirs / seconds:8.1f}")


def main() -> None:
    print(f"the libraries alone take {measure(lambda: None)[1]:.2f} GiB")
    if len(sys.argv) > 1:
        run(*(int(value) for value in sys.argv[1:5]), alone=False)
        return
    for number, size in enumerate(SIZES):
        run(*size, alone=number > 0)


if __name__ == "__main__":
    main()
