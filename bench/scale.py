"""Encoding speed with Ray workers of one core each, compared with `index add` alone on all cores.

    make bench-scale          # or: python bench/scale.py [--images N] [--size PIXELS] [--workers 1 2]

Rates are images/s from the first finished shard (or batch) of a run to its last, without starting Ray and loading the
networks, which takes a few seconds. Efficiency is the rate of n workers divided by n times the rate of one. Use as many
workers as there are cores to see the overhead of Ray: `index add` alone uses all of them.
"""

import argparse
import tempfile
import time
from contextlib import closing
from pathlib import Path

from ingest import make_checkpoint

from hashseek.indexing.collection import open_or_create
from hashseek.indexing.ingest.batch import ingest
from hashseek.indexing.ingest.sources import find_sources
from hashseek.indexing.maintenance.exchange import add_exports
from hashseek.indexing.ray_encoding import Cluster, encode_shards
from hashseek.indexing.remote import fetch
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.devices import EncoderOptions, n_cores
from hashseek.training.data.datasets.shapes import render_shapes


class Rate:
    """Images per second between the first and the last call of `see`, which is told how many are done."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def see(self, done: int, _: str = "") -> None:
        """Note that so many are done now."""
        self.seen.append((time.perf_counter(), done))

    def __float__(self) -> float:
        (start, first), (end, last) = self.seen[0], self.seen[-1]
        return (last - first) / (end - start)


def alone(files: Path, checkpoint: Path, folder: Path, options: EncoderOptions) -> float:
    """Images/s of `index add`: read, decode, encode, commit."""
    rate = Rate()
    with closing(open_or_create(folder, checkpoint=checkpoint)) as collection:
        encoder = Searcher.open(collection, **options).image_encoder
        for report in ingest(collection, encoder, find_sources([files])):
            rate.see(report.done)
    return float(rate)


def by_ray(
    files: Path, checkpoint: Path, folder: Path, options: EncoderOptions, n_workers: int, shard_size: int
) -> tuple[float, float]:
    """Images/s of the workers, and of adding their shards to a collection."""
    encoding, adding = Rate(), Rate()
    with closing(open_or_create(folder, checkpoint=checkpoint)) as collection:
        shards = encode_shards(
            find_sources([files]),
            folder.with_suffix(".shards"),
            collection=collection,
            cluster=Cluster("local", n_workers),
            options=options,
            fetch=fetch,
            shard_size=shard_size,
            stopped=lambda: False,
            progress=encoding.see,
        )
        for report in add_exports(shards, collection):
            adding.see(report.done)
    return float(encoding), float(adding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=160, help="side of an image in pixels")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shard-size", type=int, default=256)
    parser.add_argument("--backbone", default="mobilenet_v2")
    parser.add_argument("--engine", default="auto", help="auto, torch or openvino")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hashseek-bench-ingest")
    given = parser.parse_args()
    root = given.folder / f"{given.images}x{given.size}"
    render_shapes(root, n_query=0, n_train=0, n_database=given.images, size=given.size, seed=0)
    files, options = root / "images", EncoderOptions(device="auto", precision="auto", engine=given.engine)
    print(f"{given.backbone}, {given.images:,} images of {given.size} px, {n_cores()} cores\n")
    print("| | encoding images/s | efficiency | adding the shards images/s |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        checkpoint = make_checkpoint(folder / "checkpoint.safetensors", given.backbone)
        print(f"| `index add` alone | {alone(files, checkpoint, folder / 'alone', options):.0f} | | |", flush=True)
        one = 0.0
        for n in given.workers:
            encoding, adding = by_ray(files, checkpoint, folder / f"ray{n}", options, n, given.shard_size)
            one = one or encoding / n
            print(f"| {n} workers | {encoding:.0f} | {encoding / n / one:.2f} | {adding:.0f} |", flush=True)


if __name__ == "__main__":
    main()
