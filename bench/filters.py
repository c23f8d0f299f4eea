"""Time to find the images that pass a filter, and to search among them; as Markdown.

    python bench/filters.py --images 1000000

Every image of the catalog has attributes and one or several labels; codes are random.
"""

import argparse
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median

import numpy as np
from records import record

from hashseek.indexing.catalog import attributes, create_catalog
from hashseek.indexing.catalog.database import Database
from hashseek.indexing.catalog.filters import Filter, make_filter
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.retrieval.devices import n_cores

LABELS = {"0.1 %": 0.001, "1 %": 0.01, "10 %": 0.1, "90 %": 0.9}
FILTERS = {
    **{f"label of {name}": Filter(all_labels=(name,)) for name in LABELS},
    "without the label of 0.1 %": Filter(no_labels=("0.1 %",)),
    "without the label of 90 %": Filter(no_labels=("90 %",)),
    "labels of 10 % and of 90 %": Filter(all_labels=("10 %", "90 %")),
    "labels of 0.1 % and of 90 %": Filter(all_labels=("0.1 %", "90 %")),
    "label of 0.1 %, without that of 90 %": Filter(all_labels=("0.1 %",), no_labels=("90 %",)),
    "camera=C3 (1 %)": make_filter(where=["camera=C3"]),
    "year>=2015 (half)": make_filter(where=["year>=2015"]),
    "lens.name^=wide (half)": make_filter(where=["lens.name^=wide"]),
    "label of 0.1 %, year>=2015": make_filter(all_labels=["0.1 %"], where=["year>=2015"]),
    "label of 90 %, year>=2015": make_filter(all_labels=["90 %"], where=["year>=2015"]),
    "added at 0:00:05 (1,000)": make_filter(added_after="2026-01-01T00:00:05", added_before="2026-01-01T00:00:06"),
    "added since 2026-01-01 (all)": make_filter(added_after="2026-01-01"),
}


def fill(collection: Collection, n: int) -> None:
    rng = np.random.default_rng(0)
    for start in range(0, n, 10_000):
        size = min(10_000, n - start)
        codes = rng.integers(0, 256, (size, 8), dtype=np.uint8)
        carried = {name: rng.random(size) < share for name, share in LABELS.items()}
        images = [
            record(
                start + i,
                codes[i],
                [name for name, carries in carried.items() if carries[i]],
                attributes={
                    "camera": f"C{(start + i) % 100}",
                    "year": 2000 + (start + i) % 30,
                    "lens": {"name": ("wide", "long")[i % 2]},
                },
            )
            for i in range(size)
        ]
        collection.add(images)
    with closing(Database(collection.catalog.path, read_only=False)) as database, database.transaction() as db:
        times = "strftime('%Y-%m-%dT%H:%M:%SZ', '2026-01-01', (id / 1000) || ' seconds')"
        db.execute(f"UPDATE images SET added_at = {times}")  # 1,000 in a second


def milliseconds(rounds: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - started))
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{n_cores()} cores, load {os.getloadavg()[0]:.1f}; {options.images:,} images, codes of 64 bits, k = 10\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_catalog(folder / CATALOG, fingerprint="f" * 64, n_bits=64)
        collection = Collection(folder)
        started = time.perf_counter()
        fill(collection, options.images)
        print(f"adding them took {time.perf_counter() - started:.0f} s")
        collection.save_index()
        query = np.random.default_rng(1).integers(0, 256, (1, 8), dtype=np.uint8)
        print(f"without a filter a search takes {milliseconds(50, lambda: collection.search(query, k=10)):.2f} ms\n")
        print("| filter | lets through | ids from the catalog, ms | first search, ms | the same filter again, ms |")
        print("|---|---:|---:|---:|---:|")
        for title, chosen in FILTERS.items():
            ids = collection.catalog.ids_where(chosen)
            excludes = chosen == Filter(no_labels=chosen.no_labels)  # a search then asks for what does not pass
            asked = Filter(any_labels=chosen.no_labels) if excludes else chosen
            of_catalog = milliseconds(options.rounds, lambda c=asked: collection.catalog.ids_where(c))

            def first(chosen: Filter = chosen) -> None:
                collection.index.current().filtered.clear()
                collection.search(query, k=10, among=chosen)

            once = milliseconds(options.rounds, first)
            again = milliseconds(50, lambda c=chosen: collection.search(query, k=10, among=c))
            print(f"| {title} | {len(ids):,} | {of_catalog:.1f} | {once:.1f} | {again:.2f} |", flush=True)
        without_indexes(collection)
        collection.close()


def without_indexes(collection: Collection) -> None:
    """Print the size of the indexes on attributes, and the cost of their filters without them."""
    names = [title for title, chosen in FILTERS.items() if chosen.attributes]
    path, n = collection.catalog.path, len(collection)
    with closing(Database(path, read_only=False)) as database, database.transaction() as db:
        before = used_bytes(db)
        numbers = attributes.indexed_paths(db).values()
        for number in numbers:
            db.execute(f"DROP INDEX images_by_attribute_{number}")
        db.execute("DELETE FROM attribute_indexes")
        freed = before - used_bytes(db)
    print(f"\n{len(numbers)} indexes on attributes take {freed / n:.0f} bytes per image")
    print("\nWithout them:\n\n| filter | ids from the catalog, ms |\n|---|---:|")
    limit, attributes.MAX_INDEXED = attributes.MAX_INDEXED, 0
    for title in names:
        taken = milliseconds(3, lambda c=FILTERS[title]: collection.catalog.ids_where(c))
        print(f"| {title} | {taken:.0f} |", flush=True)
    attributes.MAX_INDEXED = limit


def used_bytes(db: sqlite3.Connection) -> int:
    """Bytes of the pages that are in use."""
    size, pages, free = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count", "freelist_count")
    )
    return int(size * (pages - free))


if __name__ == "__main__":
    main()
