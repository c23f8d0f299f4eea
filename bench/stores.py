"""Collections in a folder and in Milvus (BIN_FLAT and BIN_IVF_FLAT) with the same codes: rates, latencies, equality.

    make .venv-milvus/installed
    .venv-milvus/bin/milvus-server --data /tmp/milvus --proxy-port 19530 &
    make bench-stores ARGS="milvus://127.0.0.1:19530 --images 10000 100000 1000000 --plot stores.svg"

Codes lie around one random centre for every 1,000 of them, with a tenth of the bits flipped. Queries are stored codes
with up to four bits changed. Milvus has built its index before it is searched. A search is that of `hashseek search`
after encoding: the k nearest, ties by id, and their records. "equal" is the share of queries with the distances and
images of the folder, "recall" the share of hits that are as near.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
from ingest import make_checkpoint
from numpy.typing import NDArray
from records import record

from hashseek.indexing.catalog import NewImage
from hashseek.indexing.milvus.milvus_store import MilvusStore
from hashseek.indexing.milvus_uri import MilvusUri
from hashseek.indexing.opening import Store, open_store

N_BITS = 48  # of `make_checkpoint`
BATCH = 2000
Codes = NDArray[np.uint8]
Hits = list[tuple[int, str]]  # (distance, path)


def changed(codes: Codes, rng: np.random.Generator, n_bits: int) -> Codes:
    """The packed codes (N, size) with up to `n_bits` bits of each flipped."""
    codes = codes.copy()
    for _ in range(n_bits):
        at = rng.integers(0, 8 * codes.shape[1], len(codes))
        codes[np.arange(len(codes)), at // 8] ^= (1 << (at % 8)).astype(np.uint8)
    return codes


def images(codes: Codes) -> Iterator[list[NewImage]]:
    """Batches of records as `index add` stores them."""
    for start in range(0, len(codes), BATCH):
        yield [
            record(start + i, code, ("sky", "people") if i % 3 else ("tree",))
            for i, code in enumerate(codes[start : start + BATCH])
        ]


def answers(store: Store, queries: Codes, k: int) -> tuple[list[Hits], list[float]]:
    """(distance, path) of the hits of each query, ordered so that ids do not matter; milliseconds of each search."""
    found, times = [], []
    for query in queries:
        started = time.perf_counter()
        [(distances, ids)] = store.search(query[None], k=k)
        records = store.get(ids.tolist())
        times.append(1000 * (time.perf_counter() - started))
        paths = [record.path for record in records if record is not None]
        found.append(sorted(zip(distances.tolist(), paths, strict=True)))
    return found, times


def same(one: Hits, other: Hits) -> bool:
    """Equal distances, and equal images below the last one, where ids, which differ, decide which are left out."""
    last = one[-1][0]
    return [d for d, _ in one] == [d for d, _ in other] and {h for h in one if h[0] < last} == {
        h for h in other if h[0] < last
    }


def recall(found: Hits, expected: Hits) -> float:
    """The share of hits that are as near as those expected."""
    return sum(distance <= expected[-1][0] for distance, _ in found) / len(expected)


def build_index(uri: MilvusUri, n: int) -> None:
    """Wait until Milvus searches all `n` codes of a collection by its index. On its own, it does so some time later."""
    from pymilvus import MilvusClient

    client = MilvusClient(uri=f"http://{uri.server}")
    client.flush(uri.name)
    while (about := client.describe_index(uri.name, "code"))["pending_index_rows"] or about["indexed_rows"] < n:
        time.sleep(1)
    client.refresh_load(uri.name)
    client.close()


def measure(
    name: str, place: Path, checkpoint: Path, codes: Codes, queries: Codes, expected: dict[int, list[Hits]]
) -> float:
    """Print the row of a store, which is filled if it is new; the first one gives the expected answers.

    Returns the median time of a search with k = 10 (ms).
    """
    with closing(open_store(place, checkpoint=checkpoint, create=True)) as store:
        added = ""
        if not len(store):
            started = time.perf_counter()
            for batch in images(codes):
                store.add(batch)
            store.save_index()
            added = f"{len(codes) / (time.perf_counter() - started):,.0f}"
            if isinstance(store, MilvusStore):
                build_index(store.uri, len(codes))
        store.search(queries[:1], k=10)  # loads what is loaded once
        cells, medians = [], []
        for k in (10, 100):
            found, times = answers(store, queries, k)
            medians.append(float(np.median(times)))
            pairs = [*zip(found, expected.setdefault(k, found), strict=True)]
            shares = [np.mean([compared(*pair) for pair in pairs]) for compared in (same, recall)]
            cells += [f"{medians[-1]:.1f}, {np.percentile(times, 99):.1f}", "{:.2f}, {:.3f}".format(*shares)]
        with ThreadPoolExecutor(4) as pool:
            started = time.perf_counter()
            list(pool.map(lambda query: store.search(query[None], k=10), np.repeat(queries, 2, axis=0)))
            cells.append(f"{2 * len(queries) / (time.perf_counter() - started):.0f}")
    print(f"| {len(codes):,} | {name} | {added} | {' | '.join(cells)} |", flush=True)
    return medians[0]


def run(given: argparse.Namespace, n: int) -> dict[str, float]:
    """Measure every store with n codes; the median time of a search by its name (ms)."""
    rng = np.random.default_rng(0)
    centres = rng.integers(0, 256, (max(n // 1000, 1), N_BITS // 8), np.uint8)
    flipped = np.packbits(rng.random((n, N_BITS), np.float32) < 0.1, axis=1, bitorder="little")
    codes = centres[rng.integers(0, len(centres), n)] ^ flipped
    queries = changed(codes[rng.integers(0, n, given.queries)], rng, 4)
    expected: dict[int, list[Hits]] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "checkpoint.safetensors", "mobilenet_v2")
        found = {"folder": measure("folder", Path(folder) / "c", checkpoint, codes, queries, expected)}
        name = f"bench_{time.time_ns()}"
        for kind, title in (("flat", "BIN_FLAT"), ("ivf", "BIN_IVF_FLAT")):
            for consistency in ("strong", "bounded"):
                place = Path(f"{given.milvus}/{name}_{kind}?index={kind}&consistency={consistency}")
                of_milvus = f"{title}, {consistency}"
                found[of_milvus] = measure(of_milvus, place, checkpoint, codes, queries, expected)
    return found


def plot(path: Path, found: dict[int, dict[str, float]]) -> None:
    """Time of a search over the number of codes, as an SVG."""
    from matplotlib.figure import Figure

    from hashseek.training.plotting import SERIES, as_svg, style

    with style():
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for name, colour in zip(next(iter(found.values())), SERIES, strict=False):
            axes.loglog([*found], [times[name] for times in found.values()], "-o", color=colour, label=name)
        axes.set_xlabel(f"codes of {N_BITS} bits")
        axes.set_ylabel("one search, k = 10, median, ms")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(loc="center left", bbox_to_anchor=(0, 0.73))
        path.write_text(as_svg(figure, path.stem))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("milvus", help="URI of a server, milvus://HOST:PORT")
    parser.add_argument("--images", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--plot", type=Path, help="write the times by number of images to this SVG")
    given = parser.parse_args()
    print(f"Codes of {N_BITS} bits\n")
    print(
        "| codes | | added per second | k = 10, median and p99, ms | equal, recall | k = 100, ms | equal, recall | "
        "searches/s, 4 threads |"
    )
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    found = {n: run(given, n) for n in given.images}
    if given.plot:
        plot(given.plot, found)


if __name__ == "__main__":
    main()
