"""Hamming search compared with plain FAISS, usearch and the time to read the codes, as Markdown tables.

    make bench-search          # or: python bench/search.py [--rows N] [--rounds R] [--only PART ...] [--plot FILE]

Plain FAISS is `IndexBinaryFlat` at the native width. usearch is measured if it is installed (`pip install usearch`;
Hashseek does not need it). The read floor is `numpy.max` over the padded codes, by one core and by all.

Every round runs each case on its own query, so that a busy moment affects all of them. Times are medians over the
rounds, ratios medians of the ratios within a round. On a busy machine, the minimum times are more reliable, and `--cpu`
measures CPU time of all threads together: two cores take about half of it.
"""

import argparse
import os
import platform
import resource
import sqlite3
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import numpy as np
from records import record

from hashseek.indexing.catalog import Catalog, create_catalog
from hashseek.indexing.index.code_layouts import DistinctCodes, PlainCodes, Subset, collapse
from hashseek.indexing.index.duplicates import groups
from hashseek.indexing.index.hamming_index import HammingIndex, build_index, load_index, save_index
from hashseek.indexing.index.segments import joined, merged_hits, whole
from hashseek.indexing.searcher import SearchOptions
from hashseek.retrieval.codes import Codes, pad
from hashseek.retrieval.devices import n_cores
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.scores import asymmetric_scores, best

try:
    import usearch.index as usearch
except ImportError:
    usearch = None

Case = Callable[[int], object]
clock: Callable[[], float] = time.perf_counter
OVERSAMPLE = SearchOptions.oversample
K = 10


def random_codes(n: int, n_bits: int, n_distinct: int | None = None, seed: int = 0) -> Codes:
    """Packed codes (n, ceil(n_bits / 8)); with `n_distinct`, so many different ones, each about equally often."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n_distinct or n, -(-n_bits // 8)), dtype=np.uint8)
    if n_bits % 8:
        codes[:, -1] &= 2 ** (n_bits % 8) - 1
    return codes if n_distinct is None else codes[rng.integers(0, n_distinct, n)]


def timed(cases: dict[str, Case], rounds: int, *, faiss_threads: int = 1) -> dict[str, list[float]]:
    """Milliseconds of each case in each round by `clock`, after one round that does not count.

    Every other round runs backwards, since a case may gain or lose by what ran before it.

    FAISS searches with one query on one thread whatever it is given, and loses time if it is given more.
    """
    faiss.omp_set_num_threads(faiss_threads)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds + 1):
        for name in [*cases][:: 1 if i % 2 else -1]:
            started = clock()
            cases[name](i)
            times[name].append(1000 * (clock() - started))
    faiss.omp_set_num_threads(n_cores())
    return {name: of_case[1:] for name, of_case in times.items()}


def ratio(times: dict[str, list[float]], above: str, below: str) -> float:
    return median(a / b for a, b in zip(times[above], times[below], strict=True))


def table(title: str, times: dict[str, list[float]]) -> None:
    """Print times, and how many times as long as ours each case took, by median and by the least times."""
    print(f"\n{title}\n\n| | ms | times hashseek | least ms | times hashseek |\n|---|---:|---:|---:|---:|")
    for name, of_case in times.items():
        least = min(of_case) / min(times["hashseek"])
        typical = f"{median(of_case):.2f} | {ratio(times, name, 'hashseek'):.2f}"
        print(f"| {name} | {typical} | {min(of_case):.2f} | {least:.2f} |", flush=True)


def plain(codes: Codes) -> faiss.IndexBinaryFlat:
    index = faiss.IndexBinaryFlat(8 * codes.shape[1])
    index.add(codes)
    return index


def read_floor(codes: Codes, pool: ThreadPoolExecutor) -> dict[str, Case]:
    """Reading the padded codes: by one core, and by all."""
    words = codes.view(f"u{min(codes.shape[1], 8)}")
    parts = np.array_split(words, n_cores())
    return {
        "reading, one core": lambda _: words.max(),
        f"reading, {n_cores()} cores": lambda _: list(pool.map(np.max, parts)),
    }


def check(index: HammingIndex, flat: faiss.IndexBinaryFlat, xq: Codes, k: int) -> None:
    """FAISS keeps the first of equally near rows too."""
    found, wanted = index.search(xq, k=k), flat.search(xq, k)
    assert np.array_equal(found[0], wanted[0])
    assert np.array_equal(found[1], wanted[1])


def exact(n: int, n_bits: int, rounds: int, n_distinct: int | None = None) -> None:
    """One query, 64 at once, and k = 5,000, over random codes."""
    xb, xq = random_codes(n, n_bits, n_distinct), random_codes(64, n_bits, seed=1)
    index, flat = build_index(xb, np.arange(n), n_bits=n_bits), plain(xb)
    check(index, flat, xq[:4], K)
    what = f"{n:,} codes of {n_bits} bits" + (f", {len(index.rows.compared):,} of them distinct" if n_distinct else "")

    def one(i: int) -> Codes:
        return xq[i % 64 : i % 64 + 1]

    with ThreadPoolExecutor(n_cores()) as pool:
        cases: dict[str, Case] = {
            "hashseek": lambda i: index.search(one(i), k=K),
            "plain FAISS": lambda i: flat.search(one(i), K),
            **read_floor(pad(xb, -(-xb.shape[1] // 8) * 8), pool),
        }
        if usearch is not None and n_distinct is None:
            cases["usearch, exact"] = lambda i: usearch.search(
                xb, one(i), K, usearch.MetricKind.Hamming, exact=True, threads=n_cores()
            )
        table(f"{what}: one query, k = {K}", timed(cases, rounds))
    few = max(2, rounds // 5)
    batch: dict[str, Case] = {"hashseek": lambda _: index.search(xq, k=K), "plain FAISS": lambda _: flat.search(xq, K)}
    table(f"{what}: 64 queries at once, k = {K}", timed(batch, few, faiss_threads=n_cores()))
    large: dict[str, Case] = {
        "hashseek": lambda i: index.search(one(i), k=5000),
        "plain FAISS": lambda i: flat.search(one(i), 5000),
    }
    check(index, flat, xq[:1], 5000)
    table(f"{what}: one query, k = 5,000", timed(large, rounds))


def cells(largest: int, rounds: int) -> None:
    """Time of plain FAISS relative to ours, over N, K, k and the number of queries."""
    print("\n| codes | bits | queries | k | FAISS, ms | ours, ms | times ours | by least ms |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for n in (n for n in (10_000, 100_000, 10**6, 10**7) if n <= largest):
        for n_bits in (16, 32, 48, 64, 128, 256):
            xb, xq = random_codes(n, n_bits), random_codes(64, n_bits, seed=1)
            index, flat = build_index(xb, np.arange(n), n_bits=n_bits), plain(xb)
            for n_queries, k in product((1, 64), (10, 100, 1000)):
                check(index, flat, xq[:n_queries], k)

                def some(i: int, q: int = n_queries, xq: Codes = xq) -> Codes:
                    return xq[i % 64 : i % 64 + 1] if q == 1 else xq

                cases: dict[str, Case] = {
                    "FAISS": lambda i, k=k, flat=flat, some=some: flat.search(some(i), k),  # type: ignore[misc]
                    "ours": lambda i, k=k, index=index, some=some: index.search(some(i), k=k),  # type: ignore[misc]
                }
                times = timed(cases, rounds, faiss_threads=min(n_queries, n_cores()))
                least = {name: min(of_case) for name, of_case in times.items()}
                print(
                    f"| {n:,} | {n_bits} | {n_queries} | {k:,} | {least['FAISS']:.3f} | {least['ours']:.3f} "
                    f"| {ratio(times, 'FAISS', 'ours'):.2f} | {least['FAISS'] / least['ours']:.2f} |",
                    flush=True,
                )


def large(n: int, rounds: int) -> None:
    """Codes of 64 bits in mapped files: writing, opening, searching beside reading them, and adding."""
    xb, ids = np.random.default_rng(0).integers(0, 2**64, n, np.uint64).view(np.uint8).reshape(n, 8), np.arange(n)
    peak = "%.2f GB of memory at most since the start"

    def so_far() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    print(
        f"\n{n:,} codes of 64 bits, {(xb.nbytes + ids.nbytes) / 2**30:.2f} GB with ids; {so_far():.2f} GB used so far\n"
    )
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(n_cores()) as pool:
        started = time.perf_counter()
        index = build_index(xb, ids, n_bits=64)
        print(f"building {time.perf_counter() - started:.1f} s, {peak % so_far()}")
        started = time.perf_counter()
        files = save_index(index, Path(folder))
        print(f"writing {time.perf_counter() - started:.1f} s, {peak % so_far()}")
        del xb, ids, index
        started = time.perf_counter()
        built = whole(load_index(files, n_bits=64))
        print(f"opening {time.perf_counter() - started:.2f} s")
        xq = random_codes(64, 64, seed=1)
        fresh = whole(build_index(xq[:1], np.array([n]), n_bits=64))
        started = time.perf_counter()
        fresh = joined([fresh.left(), (xq[1:2], np.array([n + 1]))], n_bits=64)
        found = (segment.index.search(xq[1:2], k=K) for segment in (built, fresh))
        [(_, nearest_ids)] = [merged_hits(*((d[0], i[0]) for d, i in found), K)]
        print(
            f"adding a code and finding it {1000 * (time.perf_counter() - started):.0f} ms: {nearest_ids[0] == n + 1}"
        )
        cases: dict[str, Case] = {
            "hashseek": lambda i: built.index.search(xq[i % 64 : i % 64 + 1], k=K),
            **read_floor(built.index.rows.codes, pool),
        }
        table(f"one query, k = {K}", timed(cases, rounds))


def on_gpu(n: int, rounds: int) -> None:
    """The kind `gpu` beside FAISS's own index on the GPU, whose order of ties is arbitrary, and the exact kind."""
    xb, xq = random_codes(n, 64), random_codes(1024, 64, seed=1)
    index = build_index(xb, np.arange(n), n_bits=64, kind="gpu")
    exact_kind = replace(index, kind="exact", gpu=None)
    theirs = faiss.GpuIndexBinaryFlat(faiss.StandardGpuResources(), 64)
    theirs.add(xb)
    print(f"\n{n:,} codes of 64 bits on a GPU, ms (median)\n")
    print("| queries | k | kind gpu | FAISS on the GPU | times ours | kind exact, CPU | times ours |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for n_queries, k in product((1, 64, 1024), (10, 100, 1000)):
        some = xq[:n_queries]
        wanted, found = exact_kind.search(some[:4], k=k), index.search(some[:4], k=k)
        assert all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))
        assert np.array_equal(theirs.search(some[:4], k)[0], wanted[0])
        cases: dict[str, Case] = {
            "gpu": lambda _, some=some, k=k: index.search(some, k=k),  # type: ignore[misc]
            "FAISS": lambda _, some=some, k=k: theirs.search(some, k),  # type: ignore[misc]
        }
        if n_queries * n <= 64 * 10**7:
            cases["exact"] = lambda _, some=some, k=k: exact_kind.search(some, k=k)  # type: ignore[misc]
        times = timed(cases, rounds, faiss_threads=min(n_queries, n_cores()))
        on_cpu = f"{median(times['exact']):.1f} | {ratio(times, 'exact', 'gpu'):.1f}" if "exact" in times else "|"
        print(
            f"| {n_queries} | {k:,} | {median(times['gpu']):.2f} | {median(times['FAISS']):.2f} "
            f"| {ratio(times, 'FAISS', 'gpu'):.2f} | {on_cpu} |",
            flush=True,
        )


def filters(n: int, rounds: int) -> None:
    """Searches among some of the rows."""
    xb, xq = random_codes(n, 64), random_codes(64, 64, seed=1)
    index, flat, rng = build_index(xb, np.arange(n), n_bits=64), plain(xb), np.random.default_rng(0)
    print(f"\n{n:,} codes of 64 bits: one query, k = {K}, among some of them\n")
    print("| share of rows | ms | FAISS with a bitmap | times | first search, rows from ids, ms |")
    print("|---:|---:|---:|---:|---:|")
    for share in (0.0001, 0.001, 0.01, 0.05, 0.1, 0.3, 0.9, 0.999):
        mask = rng.random(n) < share
        ids = np.flatnonzero(mask)
        started = time.perf_counter()
        among = index.subset_of(ids)
        index.search(xq[:1], k=K, among=among)
        first = 1000 * (time.perf_counter() - started)
        bitmap = np.packbits(mask, bitorder="little")
        parameters = faiss.SearchParameters(sel=faiss.IDSelectorBitmap(bitmap))
        cases: dict[str, Case] = {
            "ours": lambda i, among=among: index.search(xq[i % 64 : i % 64 + 1], k=K, among=among),  # type: ignore[misc]
            "FAISS": lambda i, p=parameters: flat.search(xq[i % 64 : i % 64 + 1], K, params=p),  # type: ignore[misc]
        }
        times = timed(cases, rounds)
        ours, theirs = median(times["ours"]), median(times["FAISS"])
        print(
            f"| {share:g} | {ours:.2f} | {theirs:.2f} | {ratio(times, 'FAISS', 'ours'):.1f} | {first:.1f} |", flush=True
        )


def layouts(n: int, rounds: int) -> None:
    """Each distinct code stored once, and some rows searched by copying their codes: when they are faster."""

    def search(rows: PlainCodes | DistinctCodes, xq: Codes, among: Subset | None = None) -> Case:
        return lambda i: rows.search(xq[i % 64 : i % 64 + 1], k=K, limit=8 * xq.shape[1], among=among)

    print(f"\n{n:,} codes of 48 bits, one query, k = {K}: each distinct code once, compared with one code per row\n")
    print("| distinct per row | once, ms | per row, ms | times | bytes per row |\n|---:|---:|---:|---:|---:|")
    xq = pad(random_codes(64, 48, seed=1), 8)
    for drawn_from in (0.05, 0.3, 0.6, 1.3, 3):  # this many codes per row
        rows = PlainCodes(pad(random_codes(n, 48, int(drawn_from * n)), 8))
        once = collapse(rows.codes)
        times = timed({"once": search(once, xq), "per row": search(rows, xq)}, rounds)
        shown = " | ".join(f"{median(times[name]):.2f}" for name in times)
        factor = ratio(times, "per row", "once")
        print(f"| {len(once.compared) / n:.2f} | {shown} | {factor:.1f} | {once.n_bytes / n:.0f} |", flush=True)
    print(
        f"\n{n:,} codes, one query, k = {K}, among some rows: copying their codes, compared with masking the others\n"
    )
    print("| bits | share of rows | copying, ms | masking, ms | times |\n|---:|---:|---:|---:|---:|")
    for n_bits, share in product((64, 256), (0.02, 0.04, 0.06, 0.08, 0.12, 0.16)):
        rows, xq = PlainCodes(random_codes(n, n_bits)), random_codes(64, n_bits, seed=1)
        mask = np.random.default_rng(0).random(n) < share
        few, masked = Subset(mask), Subset(mask)
        few.is_small, masked.is_small = True, False
        times = timed({"copying": search(rows, xq, few), "masking": search(rows, xq, masked)}, rounds)
        shown = " | ".join(f"{median(times[name]):.2f}" for name in times)
        print(f"| {n_bits} | {share:g} | {shown} | {ratio(times, 'masking', 'copying'):.2f} |", flush=True)


def rankings(n: int, rounds: int) -> None:
    """Asymmetric ranking of the nearest codes beside the Hamming search."""
    for n_bits, k in ((256, 100), (256, 10), (48, 100)):
        xb, xq = random_codes(n, n_bits), random_codes(64, n_bits, seed=1)
        outputs = np.random.default_rng(2).standard_normal((64, n_bits)).astype(np.float32)
        index = build_index(xb, np.arange(n), n_bits=n_bits)

        def hamming(i: int, index: HammingIndex = index, xq: Codes = xq, k: int = k) -> object:
            return index.search(xq[i % 64 : i % 64 + 1], k=k)

        def asymmetric(
            i: int, index: HammingIndex = index, xq: Codes = xq, k: int = k, outputs: Any = outputs
        ) -> object:
            [(_, ids)] = index.search_ties(xq[i % 64 : i % 64 + 1], k=OVERSAMPLE * k)
            scores = asymmetric_scores(index.codes_of(ids), outputs[i % 64])
            return ids[best(scores, ids, k)]

        times = timed({"hashseek": hamming, f"asymmetric, {OVERSAMPLE} x k candidates": asymmetric}, rounds)
        table(f"{n:,} codes of {n_bits} bits: one query, k = {k}", times)


def sizes(n: int) -> None:
    """Build and load times, and bytes per image."""
    print(f"\n{n:,} codes: building, saving, loading, bytes per image\n")
    print("| codes | build s | save s | load s | codes compared | bytes in memory | bytes on disk |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for n_bits, n_distinct in ((48, None), (64, None), (128, None), (48, n // 50)):
        xb, ids = random_codes(n, n_bits, n_distinct), np.arange(n)
        with tempfile.TemporaryDirectory() as folder:
            marks = [time.perf_counter()]
            index = build_index(xb, ids, n_bits=n_bits)
            marks.append(time.perf_counter())
            files = save_index(index, Path(folder))
            on_disk = sum(file.stat().st_size for file in files)
            marks.append(time.perf_counter())
            load_index(files, n_bits=n_bits)
            marks.append(time.perf_counter())
        build, save, load = np.diff(marks)
        name = f"{n_bits} bits, {'random' if n_distinct is None else f'{n_distinct:,} distinct'}"
        compared = f"{len(index.rows.compared):,}"
        print(
            f"| {name} | {build:.2f} | {save:.2f} | {load:.2f} | {compared} | {index.n_bytes / n:.1f} "
            f"| {on_disk / n:.1f} |",
            flush=True,
        )
    few = 20_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "catalog.sqlite"
        create_catalog(path, fingerprint="f" * 64, n_bits=48)
        catalog = Catalog(path)
        catalog.add([record(i, code, "ab") for i, code in enumerate(random_codes(few, 48))])
        catalog.close()
        database = sqlite3.connect(path)
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.close()
        print(f"\nThe catalog takes {path.stat().st_size / few:.0f} bytes per image (30 characters of path, 2 labels).")


def kinds(n: int, rounds: int) -> None:
    """Approximate kinds, and usearch's graph, beside exact search."""
    rng = np.random.default_rng(0)
    centres = rng.integers(0, 2, (n // 100, 64), dtype=np.uint8)
    bits = centres[rng.integers(0, len(centres), n + 200)] ^ (rng.random((n + 200, 64)) < 0.15)
    codes = np.packbits(bits, axis=1, bitorder="little")
    xb, xq = codes[:n], codes[n:]
    print(f"\n{n:,} codes of 64 bits around {len(centres):,} centres: one query, k = {K}\n")
    print("| kind | effort | recall@10 | ms | build s | bytes per image |")
    print("|---|---:|---:|---:|---:|---:|")
    furthest = build_index(xb, np.arange(n), n_bits=64).search(xq, k=K)[0][:, -1:]

    def row(name: str, effort: object, search: Case, recall: float, build: float, n_bytes: int) -> None:
        ms = median(timed({name: search}, rounds)[name])
        print(f"| {name} | {effort} | {recall:.3f} | {ms:.3f} | {build:.1f} | {n_bytes / n:.0f} |", flush=True)

    for kind in ("exact", "ivf", "hnsw"):
        started = time.perf_counter()
        index = build_index(xb, np.arange(n), n_bits=64, kind=kind)
        build = time.perf_counter() - started
        for effort in index.recall or [None]:
            recall = float((index.search(xq, k=K, effort=effort)[0] <= furthest).mean())

            def search(i: int, index: HammingIndex = index, effort: int | None = effort) -> object:
                return index.search(xq[i % 200 : i % 200 + 1], k=K, effort=effort)

            row(kind, "" if effort is None else effort, search, recall, build, index.n_bytes)
    if usearch is None:
        return
    started = time.perf_counter()
    graph = usearch.Index(ndim=64, metric="hamming", dtype="b1", connectivity=16, expansion_add=100)
    graph.add(np.arange(n), xb, threads=n_cores())
    build = time.perf_counter() - started
    for effort in (16, 64, 256):
        graph.expansion_search = effort
        recall = float((graph.search(xq, K, threads=n_cores()).distances <= furthest).mean())
        row("usearch HNSW", effort, lambda i: graph.search(xq[i % 200], K), recall, build, graph.memory_usage)


def clustered_codes(n: int, n_bits: int, seed: int) -> Codes:
    """Codes as a hash layer gives them: signs of points near one of 20,000 centres in a space of 24 dimensions."""
    rng = np.random.default_rng(0)
    centres, projection = rng.standard_normal((20_000, 24), np.float32), rng.standard_normal((24, n_bits), np.float32)
    rng, parts = np.random.default_rng(seed), []
    for start in range(0, n, 10**6):  # to save memory
        points = centres[rng.integers(0, len(centres), min(10**6, n - start))]
        points += 0.7 * rng.standard_normal(points.shape, np.float32)
        parts.append(np.packbits(points @ projection > 0, axis=1, bitorder="little"))
    return np.concatenate(parts)


def tables(n: int, rounds: int) -> None:
    """The kinds multi-index and exact: one query, and 64 at once."""
    print(f"\n{n:,} codes of 64 bits: milliseconds, median and slowest\n")
    print("| codes | queries | k | multi-index | slowest | exact | slowest | times as fast | bytes per image |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, draw in {"clustered": clustered_codes, "random": lambda *of: random_codes(*of[:2], seed=of[2])}.items():
        xb, xq = draw(n, 64, 1), draw(64 * (rounds + 1), 64, 2)
        kinds = {kind: build_index(xb, np.arange(n), n_bits=64, kind=kind) for kind in ("multi-index", "exact")}
        for n_queries, k in product((1, 64), (10, 100)):
            found: dict[str, Case] = {
                kind: lambda i, q=n_queries, k=k, index=index: index.search(xq[i * q : (i + 1) * q], k=k)  # noqa: B023
                for kind, index in kinds.items()
            }
            for each in zip(*(case(0) for case in found.values()), strict=True):
                assert np.array_equal(*each)
            times = timed(found, rounds, faiss_threads=min(n_queries, n_cores()))
            cells = " | ".join(f"{figure(of_kind):.1f}" for of_kind in times.values() for figure in (median, max))
            n_bytes = ", ".join(f"{index.n_bytes / n:.0f}" for index in kinds.values())
            print(
                f"| {name} | {n_queries} | {k} | {cells} | {ratio(times, 'exact', 'multi-index'):.1f} | {n_bytes} |",
                flush=True,
            )


def duplicates(n: int) -> None:
    """Groups of near-duplicates."""
    print(f"\n{n:,} codes, a tenth copies with two bits changed: groups of near-duplicates\n")
    print("| codes | radius | groups | images in them | s | in the service, s |")
    print("|---|---:|---:|---:|---:|---:|")
    for n_bits, n_copied in ((64, n // 10), (48, n // 10)):
        rng = np.random.default_rng(0)
        xb = random_codes(n - n_copied, n_bits)
        copies = xb[rng.integers(0, len(xb), n_copied)]
        copies[np.arange(n_copied), rng.integers(0, copies.shape[1], n_copied)] ^= 5  # two bits differ
        index = build_index(np.concatenate([xb, copies]), np.arange(n), n_bits=n_bits)
        for radius in (0, 2, 4, 6):
            seconds = []
            for parallel in (True, False):  # the service leaves the other cores to searches
                started = time.perf_counter()
                lengths = [len(group) for group in groups(index, radius=radius, parallel=parallel)]
                seconds.append(f"{time.perf_counter() - started:.2f}")
            n_images, shown = sum(lengths), " | ".join(seconds)
            print(f"| {n_bits} bits | {radius} | {len(lengths):,} | {n_images:,} | {shown} |", flush=True)


def curves(n: int, rounds: int, path: Path) -> None:
    """The least time of the rounds over N and over K, as a plot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (over_n, over_k) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    sizes_n = [size for size in (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000) if size <= n]
    widths = [16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    points: dict[str, list[dict[str, list[float]]]] = {"N": [], "K": []}
    with ThreadPoolExecutor(n_cores()) as pool:
        for axis, pairs in (
            ("N", [(size, 48) for size in sizes_n]),
            ("K", [(min(n, 10**6), width) for width in widths]),
        ):
            for size, width in pairs:
                xb, xq = random_codes(size, width), random_codes(64, width, seed=1)
                index, flat = build_index(xb, np.arange(size), n_bits=width), plain(xb)
                cases: dict[str, Case] = {
                    "hashseek": lambda i, x=index, q=xq: x.search(q[i % 64 : i % 64 + 1], k=K),  # type: ignore[misc]
                    "plain FAISS": lambda i, x=flat, q=xq: x.search(q[i % 64 : i % 64 + 1], K),  # type: ignore[misc]
                    "reading the padded codes": list(read_floor(index.rows.codes, pool).values())[1],
                }
                points[axis].append(timed(cases, rounds))
    unit = "ms" if clock is time.perf_counter else "CPU ms of all threads"
    for axes, axis, places in ((over_n, "N", sizes_n), (over_k, "K", widths)):
        for name in points[axis][0]:
            style = {"hashseek": "-o", "plain FAISS": "-s"}.get(name, "--")
            axes.loglog(places, [min(times[name]) for times in points[axis]], style, label=name, markersize=4)
        axes.grid(alpha=0.3, which="both")
        axes.set_ylabel(unit)
        axes.set_title("one query, k = 10, least of the rounds", fontsize=10)
        print(f"\n| {axis} | " + " | ".join(f"{place:,}" for place in places) + " |")
        print("|---|" + "---:|" * len(places))
        for name in points[axis][0]:
            print(f"| {name}, {unit} | " + " | ".join(f"{min(times[name]):.3f}" for times in points[axis]) + " |")
    over_n.set_xlabel("codes of 48 bits (N)")
    over_k.set_xlabel(f"bits (K), {min(n, 10**6):,} codes")
    over_k.set_xticks([16, 32, 64, 128, 256, 512, 1024], labels=["16", "32", "64", "128", "256", "512", "1024"])
    over_k.minorticks_off()
    over_n.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"\nwrote {path}")


def machine(when: str) -> None:
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"{when}: {n_cores()} cores, load {load}, {platform.machine()}, "
        f"FAISS {faiss.__version__}, NumPy {np.__version__}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000, help="codes to search (default 10,000,000)")
    parser.add_argument("--graph-rows", type=int, default=200_000, help="codes for approximate kinds (200,000)")
    parser.add_argument("--duplicate-rows", type=int, default=1_000_000, help="codes for near-duplicates (1,000,000)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only",
        nargs="*",
        help="parts: 48, 64, equal, cells, filters, layouts, rankings, sizes, kinds, duplicates; by name only: tables, "
        "large, gpu",
    )
    parser.add_argument("--plot", type=Path, help="write curves over N and K to this SVG or PNG")
    parser.add_argument("--cpu", action="store_true", help="measure CPU time of all threads, for a busy machine")
    options = parser.parse_args()
    if options.cpu:
        global clock
        clock = time.process_time
        print("All times are CPU times, of all threads together.")
    faiss.omp_set_num_threads(n_cores())
    machine("before")
    if usearch is None:
        print("usearch is not installed: `pip install usearch` adds it to the comparison.")
    parts: dict[str, Callable[[], None]] = {
        "48": lambda: exact(options.rows, 48, options.rounds),
        "64": lambda: exact(options.rows, 64, options.rounds),
        "equal": lambda: exact(options.rows, 48, options.rounds, n_distinct=options.rows // 50),
        "cells": lambda: cells(options.rows, options.rounds),
        "filters": lambda: filters(options.rows, options.rounds),
        "layouts": lambda: layouts(options.rows, options.rounds),
        "rankings": lambda: rankings(min(options.rows, 10**6), options.rounds),
        "sizes": lambda: sizes(options.rows),
        "kinds": lambda: kinds(options.graph_rows, options.rounds),
        "duplicates": lambda: duplicates(options.duplicate_rows),
    }
    usual = [*parts]
    parts["tables"] = lambda: tables(options.rows, options.rounds)
    parts["large"] = lambda: large(options.rows, options.rounds)
    parts["gpu"] = lambda: on_gpu(options.rows, options.rounds)
    for name in usual if options.only is None else options.only:
        if name not in parts:
            parser.error(f"there is no part {name!r}: use {', '.join(parts)}")
        try:
            parts[name]()
        except BadConfig as error:  # there is no GPU
            parser.error(str(error))
    if options.plot is not None:
        curves(options.rows, options.rounds, options.plot)
    machine("\nafter")


if __name__ == "__main__":
    main()
