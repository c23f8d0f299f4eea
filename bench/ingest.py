"""Batch indexing compared with the network alone and with a plain loop; and ways of decoding images.

    make bench-ingest          # or: python bench/ingest.py [--images N] [--size PIXELS] [--rounds R] [--decoding]
    make bench-ingest ARGS="--pictures FOLDER [--weights FILE] [--backbone NAME]"

The images are scenes of the data set `shapes`, rendered once into `--folder`. Every round measures each in turn, so
that a busy moment affects all of them:

    network   Encoder.encode_pixels on pixels in memory, in the precision that `auto` selects here
    decoding  files to pixels on all cores, nothing else: with the network on the same cores, the upper bound for add
    add       what `hashseek index add` does with the round's share of the files: read, hash, decode, encode, commit
    loop      PIL, float32, batch 32, one INSERT and commit per row, on a sample of the same files

Ratios are medians over the rounds; resident memory is read after each.

With `--pictures` it measures the creation of a collection instead: `hashseek index add` of all pictures in a folder,
which fits a hash layer to them, and the first `hashseek search`, compared with the network alone before and after.
"""

import argparse
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter as clock

import numpy as np
import torch
from PIL import Image

from hashseek.indexing.collection import Collection, open_or_create
from hashseek.indexing.fit_options import DEFAULT_BITS, FitOptions, find_network
from hashseek.indexing.fitting import Fitting
from hashseek.indexing.ingest.batch import ingest
from hashseek.indexing.ingest.sources import find_sources
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.checkpoint import load_checkpoint, save_checkpoint
from hashseek.retrieval.codes import pack
from hashseek.retrieval.devices import n_cores
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.images import Preprocessing, load_file
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.data.datasets.shapes import render_shapes

PREPROCESSING = Preprocessing(size=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def make_checkpoint(path: Path, backbone: str) -> Path:
    """A checkpoint of 48 bits with random weights, which take the same time."""
    torch.manual_seed(0)
    save_checkpoint(path, HashModel(backbone=backbone, n_bits=48).eval(), PREPROCESSING, label_names=("a", "b"))
    return path


def network(encoder: Encoder, n: int) -> float:
    """Images/s of the network on pixels in memory."""
    size = encoder.preprocessing.size
    pixels = np.random.default_rng(0).integers(0, 256, (encoder.batch_size, 3, size, size), dtype=np.uint8)
    n_batches = max(1, n // encoder.batch_size)
    started = clock()
    for _ in range(n_batches):
        encoder.encode_pixels(pixels)
    return n_batches * encoder.batch_size / (clock() - started)


def add(collection: Collection, encoder: Encoder, files: Sequence[Path]) -> float:
    """Images/s of adding files."""
    before = len(collection)
    started = clock()
    *_, report = ingest(collection, encoder, find_sources(files))
    seconds = clock() - started
    assert len(collection) - before == report.added == len(files), "every image was to be new"
    return len(files) / seconds


def decode(files: Sequence[Path]) -> float:
    """Images/s of reading and decoding files on all cores."""
    started = clock()
    with ThreadPoolExecutor(n_cores()) as threads:
        for _pixels_of_one in threads.map(_pixels, files):
            pass
    return len(files) / (clock() - started)


def loop(database: sqlite3.Connection, model: torch.nn.Module, files: Sequence[Path]) -> float:
    """Images/s of a simple loop."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (PREPROCESSING.mean, PREPROCESSING.std))
    started = clock()
    for start in range(0, len(files), 32):
        batch = []
        for path in files[start : start + 32]:
            image = Image.open(path).convert("RGB").resize((256, 256), Image.Resampling.BILINEAR)
            pixels = torch.from_numpy(np.array(image.crop((16, 16, 240, 240)))).permute(2, 0, 1) / 255
            batch.append((pixels - mean) / std)
        with torch.inference_mode():
            codes = pack(model(torch.stack(batch)).numpy())
        for path, code in zip(files[start : start + 32], codes, strict=True):
            database.execute("INSERT INTO images VALUES (?, ?)", (str(path), code.tobytes()))
            database.commit()
    return len(files) / (clock() - started)


def from_nothing(
    pictures: Path, folder: Path, *, backbone: str, weights: str, engine: str, rounds: int, n_network: int
) -> None:
    fitting = Fitting(find_network(FitOptions(backbone=backbone, weights=weights)), engine=engine)
    encoder = fitting.encoder  # the converted network is cached from now on
    n_pictures = sum(path.is_file() for path in pictures.iterdir())
    print(f"{backbone}, {encoder.engine}, {n_cores()} cores, {n_pictures:,} pictures, {DEFAULT_BITS} bits")
    network(encoder, 2 * encoder.batch_size)  # warm up
    ratios = []
    for number in range(rounds):
        collection = str(folder / f"collection-{number}")
        before, started = network(encoder, n_network), clock()
        how = ("--backbone", backbone, "--weights", weights, "--engine", engine)
        hashseek("index", "add", collection, str(pictures), *how)
        added = clock()
        hashseek("search", collection, str(next(pictures.iterdir())), "--engine", engine)
        ended = clock()
        alone = (before + network(encoder, n_network)) / 2
        ratios.append(n_pictures / (ended - started) / alone)
        print(
            f"index add {added - started:.1f} s, search {ended - added:.1f} s: {n_pictures / (ended - started):.0f} "
            f"images/s, {ratios[-1]:.2f} of {alone:.0f} of the network alone",
            flush=True,
        )
    print(f"median {median(ratios):.2f}")


def hashseek(*arguments: str) -> None:
    """Run a command in its own process."""
    subprocess.run([sys.executable, "-m", "hashseek", *arguments], check=True, capture_output=True)


def resident() -> float:
    """Resident memory of this process, MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(
    files: Sequence[Path], folder: Path, *, backbone: str, engine: str, rounds: int, n_network: int, n_loop: int
) -> None:
    checkpoint = make_checkpoint(folder / "checkpoint.safetensors", backbone)
    model = load_checkpoint(checkpoint).model.eval()
    shares = [list(files[start::rounds]) for start in range(rounds)]
    speeds: dict[str, list[float]] = {"network": [], "decoding": [], "add": [], "loop": []}
    with (
        closing(open_or_create(folder / "collection", checkpoint=checkpoint)) as collection,
        closing(sqlite3.connect(folder / "plain.sqlite")) as plain,
    ):
        plain.execute("CREATE TABLE images (path TEXT, code BLOB)")
        encoder = Searcher.open(collection, engine=engine).encoder
        network(encoder, 2 * encoder.batch_size)  # warm up
        print(f"{backbone}, {encoder.engine}, batch {encoder.batch_size}, {n_cores()} cores, {len(files):,} images")
        print("\n| round | network | decoding | add | loop | resident MiB |\n|---:|---:|---:|---:|---:|---:|")
        for number, share in enumerate(shares, start=1):
            speeds["network"].append(network(encoder, n_network))
            speeds["decoding"].append(decode(share[:n_network]))
            speeds["add"].append(add(collection, encoder, share))
            speeds["loop"].append(loop(plain, model, share[:n_loop]))
            line = " | ".join(f"{of_case[-1]:.0f}" for of_case in speeds.values())
            print(f"| {number} | {line} | {resident():.0f} |", flush=True)
        started = clock()
        collection.save_index()
        print(f"\nwriting the index at the end: {clock() - started:.2f} s")
        problems = collection.verify() if len(files) <= 10_000 else []
        assert not problems, problems
    for name, of_case in speeds.items():
        print(f"{name}: {median(of_case):.0f} images/s (median; {min(of_case):.0f} to {max(of_case):.0f})")
    cases = zip(speeds["network"], speeds["decoding"], speeds["add"], strict=True)
    bounds = [(1 / (1 / network + 1 / decoding), ours) for network, decoding, ours in cases]
    possible, ours = median(bound for bound, _ in bounds), median(add / bound for bound, add in bounds)
    print(f"network and decoding, one after the other, would reach {possible:.0f} images/s; add is {ours:.2f} of that")
    for other in ("network", "loop"):
        ratio = median(ours / theirs for ours, theirs in zip(speeds["add"], speeds[other], strict=True))
        print(f"add is {ratio:.2f} times {other}")


def _pixels(path: Path) -> np.ndarray:
    return load_file(path.read_bytes(), PREPROCESSING).pixels


def _count(files: Sequence[Path]) -> int:
    return sum(_pixels(path).size for path in files)


def decoding(files: Sequence[Path], rounds: int) -> None:
    """Compare threads with processes, which send their pixels back or keep them; and with and without DCT scaling."""
    print(
        "images/s decoded\n\n| workers | threads | processes | processes that keep the pixels |\n|---:|---:|---:|---:|"
    )
    for n in sorted({*(2**i for i in range(n_cores().bit_length())), n_cores()}):
        speeds: list[list[float]] = [[], [], []]
        parts = [files[start :: 8 * n] for start in range(8 * n)]
        with ThreadPoolExecutor(n) as threads, ProcessPoolExecutor(n) as processes:
            list(processes.map(_pixels, files[: 4 * n]))
            for _ in range(rounds):
                for of_case, mapped in zip(
                    speeds,
                    (
                        partial(threads.map, _pixels, files),
                        partial(processes.map, _pixels, files, chunksize=16),
                        partial(processes.map, _count, parts),
                    ),
                    strict=True,
                ):
                    started = clock()
                    for _result in mapped():
                        pass
                    of_case.append(len(files) / (clock() - started))
        print(f"| {n} | {' | '.join(f'{median(of_case):,.0f}' for of_case in speeds)} |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "large.jpg"
        with Image.open(files[0]) as small:
            small.resize((4000, 3000), Image.Resampling.BICUBIC).save(large, quality=90)
        data = large.read_bytes()
        started = clock()
        for _ in range(5):
            load_file(data, PREPROCESSING)
        scaled = clock() - started
        started = clock()
        for _ in range(5):
            Image.open(large).convert("RGB").resize((256, 256), Image.Resampling.BILINEAR)
        plain = clock() - started
        print(f"12 megapixels: {200 * scaled:.0f} ms with DCT scaling, {200 * plain:.0f} without")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=160, help="side of an image in pixels")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--backbone", default="mobilenet_v2")
    parser.add_argument("--engine", default="auto", help="auto, torch or openvino")
    parser.add_argument("--network", type=int, default=512, help="images per round of the network alone")
    parser.add_argument("--loop", type=int, default=256, help="images per round of the plain loop")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hashseek-bench-ingest")
    parser.add_argument("--decoding", action="store_true", help="measure only the decoding of images")
    parser.add_argument(
        "--pictures", type=Path, help="a folder: measure the creation of a collection from its pictures"
    )
    parser.add_argument("--weights", default="none", help="for --pictures: see `hashseek index add`")
    options = parser.parse_args()
    if options.pictures:
        with tempfile.TemporaryDirectory() as folder:
            from_nothing(
                options.pictures,
                Path(folder),
                backbone=options.backbone,
                weights=options.weights,
                engine=options.engine,
                rounds=options.rounds,
                n_network=options.network,
            )
        return
    listing = render_shapes(
        options.folder / f"{options.images}x{options.size}",
        n_query=0,
        n_train=0,
        n_database=options.images,
        size=options.size,
        seed=0,
    )
    files = sorted((listing.parent / "images").iterdir())
    if options.decoding:
        decoding(files[:1000], options.rounds)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(
            files,
            Path(folder),
            backbone=options.backbone,
            engine=options.engine,
            rounds=options.rounds,
            n_network=options.network,
            n_loop=options.loop,
        )


if __name__ == "__main__":
    main()
