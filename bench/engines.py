"""Images per second of each encoder engine, and the agreement of their codes on real photographs.

    make bench-engines                                  # speed: mobilenet_v2 and resnet50, batches of 1 and 32
    HASHSEEK_DATA=../shared/data make bench-engines     # and the codes of runs/mirflickr25k_mobilenet_v2_hyp2_48
    python bench/engines.py --checkpoint FILE --database 4000
    python bench/engines.py --backbones efficientnet_b0 vit_b_32
    python bench/engines.py --device cuda               # a GPU; the codes are compared with those of the CPU

Speed is that of `Engine.__call__`, from uint8 pixels in memory to float32 features; the weights are random. All rows
are measured in turn, round after round, in one process, and the median over the rounds is reported, so that a busy
moment affects all of them; the CPU time per image (of all threads) is then the steadier measure. "plain" is the
network as a plain script runs it, "autocast" the same, channels last, in bf16 autocast. The last columns compare the
features of 24 images encoded alone with those of the same images in a batch: the largest difference, relative to the
largest feature, and the share of bits that differ in a hash layer of 1,024 random directions.

Codes are those of the query split and of a part of the database split: the share of bits that differ from those of
float32, and mAP@1000 (expected over ties, normalised by the relevant retrieved) of the queries in that part.
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 shows what a processor without AMX does (PyTorch only).
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.codes import unpack
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.engines import build_engine
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import Pixels, Preprocessing, load_file, normalizer, read_bytes
from hashseek.retrieval.load_ahead import load_ahead
from hashseek.retrieval.metrics import average_precision, histograms
from hashseek.retrieval.models.backbones import build_backbone, default_preprocessing
from hashseek.retrieval.models.lazy_backbone import LazyBackbone
from hashseek.training.cli.evaluate import data_options
from hashseek.training.data.datasets import Split, build_splits

RUN = Path("runs/mirflickr25k_mobilenet_v2_hyp2_48/best.safetensors")
CHOICES = {
    "cpu": (("torch", "fp32"), ("torch", "bf16"), ("openvino", "fp32"), ("openvino", "bf16")),
    "cuda": (("torch", "fp32"), ("torch", "bf16")),
}
ALONE = 200
Encode = Callable[[Pixels], NDArray[np.float32]]


def plain(network: nn.Module, preprocessing: Preprocessing, *, autocast: bool, device: str) -> Encode:
    """The network without the optimizations of the engines."""
    network = network.to(device)
    if autocast:
        network = network.to(memory_format=torch.channels_last)
    normalize = normalizer(preprocessing, torch.device(device))

    def encode(pixels: Pixels) -> NDArray[np.float32]:
        with torch.inference_mode(), torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            inputs = normalize(torch.from_numpy(pixels))
            features: torch.Tensor = network(inputs if autocast else inputs.contiguous())
        return features.flatten(1).float().cpu().numpy()

    return encode


def speed(backbone: str, *, batches: list[int], rounds: int, device: str) -> None:
    preprocessing = default_preprocessing(backbone)
    assert preprocessing is not None

    def network() -> nn.Module:
        torch.manual_seed(0)
        return build_backbone(backbone)[0].eval()

    rows: dict[str, Encode] = {
        "plain float32": plain(network(), preprocessing, autocast=False, device=device),
        "autocast bfloat16": plain(network(), preprocessing, autocast=True, device=device),
    }
    loading = {}
    for name, precision in CHOICES[device]:
        started = time.perf_counter()
        try:
            lazy = LazyBackbone.of(network(), f"bench:{backbone}")  # as one from outside: never cached
            engine = build_engine(name, lazy, preprocessing, device=device, precision=precision)
        except BadConfig as error:
            print(f"{name} {precision}: {error}")
            continue
        loading[engine.name], rows[engine.name] = time.perf_counter() - started, engine
    rng = np.random.default_rng(0)
    size = preprocessing.size
    pixels = {batch: rng.integers(0, 256, (batch, 3, size, size), dtype=np.uint8) for batch in batches}
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {
        (name, batch): [] for name in rows for batch in batches
    }
    for number in range(rounds + 1):  # the first warms up
        for (name, batch), times in seconds.items():
            started, used = time.perf_counter(), time.process_time()
            repeats = max(1, 8 // batch)
            for _ in range(repeats):
                rows[name](pixels[batch])
            if number:
                times.append(((time.perf_counter() - started) / repeats, (time.process_time() - used) / repeats))
    heads = "".join(f"{f'batch {batch}':>12}{'CPU ms':>9}" for batch in batches)
    print(f"\n{f'{backbone}, {size} px':30}{heads}     loading   alone: features      bits")
    images = rng.integers(0, 256, (24, 3, size, size), dtype=np.uint8)
    for name in rows:
        shown = ""
        for batch in batches:
            elapsed, used = np.median(seconds[name, batch], axis=0) / batch
            shown += f"{1 / elapsed:12.1f}{1000 * used:9.1f}"
        if name in loading:
            features, bits = alone_and_together(rows[name], images)
            shown += f"{loading[name]:10.1f} s{features:18.1e}{100 * bits:8.3f} %"
        print(f"{name:30}{shown}", flush=True)


def alone_and_together(encode: Encode, images: Pixels) -> tuple[float, float]:
    """How much the images' features differ if each is encoded alone: the largest difference, and the share of bits."""
    together, alone = encode(images), np.concatenate([encode(images[i : i + 1]) for i in range(len(images))])
    directions = np.random.default_rng(0).standard_normal((together.shape[1], 1024)).astype(np.float32)
    bits = [(features - together.mean(axis=0)) @ directions > 0 for features in (together, alone)]
    return float(np.abs(together - alone).max() / np.abs(together).max()), float((bits[0] != bits[1]).mean())


def pixels_of(split: Split, preprocessing: Preprocessing) -> Pixels:
    """Decoded once for all engines: 0.15 MB an image."""

    def load(path: Path) -> Pixels:
        return load_file(read_bytes(path), preprocessing, name=str(path)).pixels

    return np.stack(list(load_ahead(split.paths, load, depth=64)))


def agreement(file: Path, *, n_database: int, device: str) -> None:
    header = load_checkpoint(file).header
    preprocessing = header.image_preprocessing()
    name, options = data_options(file, None)  # what it was trained on
    splits = build_splits(name, **options)
    chosen = np.sort(np.random.default_rng(0).permutation(len(splits.database))[:n_database])
    query, database = splits.query, splits.database.take(chosen)
    pixels = np.concatenate([pixels_of(split, preprocessing) for split in (query, database)])
    print(f"\n{file}: {len(query)} queries, {len(database)} of the database")
    reference: NDArray[np.uint8] | None = None
    choices = [(device, *choice) for choice in CHOICES[device]]
    for where, name, precision in choices if device == "cpu" else [("cpu", "torch", "fp32"), *choices]:
        encoder = Encoder(load_checkpoint(file), device=where, engine=name, precision=precision)
        encoder.encode_pixels(pixels[:1])
        started = time.perf_counter()
        codes = encoder.encode_pixels(pixels)
        seconds = time.perf_counter() - started
        alone = np.concatenate([encoder.encode_pixels(pixels[i : i + 1]) for i in range(ALONE)])
        differ_alone = (unpack(alone, encoder.n_bits) != unpack(codes[:ALONE], encoder.n_bits)).mean()
        bits = unpack(codes, encoder.n_bits)
        reference = bits if reference is None else reference
        differ = (bits != reference).sum(axis=1)
        found = histograms(
            codes[: len(query)], codes[len(query) :], query.labels, database.labels, n_bits=encoder.n_bits
        )
        value = average_precision(found, n=1000).expected.mean()
        print(
            f"{encoder.engine:30} {100 * differ.mean() / encoder.n_bits:7.3f} % of bits and "
            f"{100 * (differ > 0).mean():.1f} % of codes differ, at most {differ.max()} bits; mAP@1000 {value:.4f}; "
            f"{len(pixels) / seconds:.0f} images/s; {100 * differ_alone:.3f} % of bits differ if encoded alone",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and agreement of encoder engines.")
    parser.add_argument("--backbones", nargs="*", default=["mobilenet_v2", "resnet50"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, default=RUN)
    parser.add_argument("--database", type=int, default=4000, help="photographs of the database; 0 skips the codes")
    parser.add_argument("--device", choices=CHOICES, default="cpu")
    given = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    for backbone in given.backbones:
        speed(backbone, batches=given.batches, rounds=given.rounds, device=given.device)
    if not given.database:
        return
    if "HASHSEEK_DATA" in os.environ and given.checkpoint.is_file():
        agreement(given.checkpoint, n_database=given.database, device=given.device)
    else:
        print(f"\nno codes: they need HASHSEEK_DATA and {given.checkpoint}, which `hashseek train` writes")


if __name__ == "__main__":
    main()
