"""Images per second and peak memory of training, compared with a plain PyTorch loop on the same network and data.

    HASHSEEK_DATA=../shared/data make bench-train      # photographs; without HASHSEEK_DATA, the built-in shapes
    python bench/train.py [IMAGES]                     # 400 of them: five minutes on two cores

The plain loop has the structure of the published HyP2 script: a data set that opens every picture with Pillow, the
transforms of torchvision, a DataLoader with one worker per core, float32, one backward pass per batch. It gets the same
pictures, crops of the same distribution, MobileNet v2 at 224 px with its batch norm in evaluation mode (this network's
weights have it folded), the same HyP2 loss, AdamW and batch. Ours is `hashseek train` itself, measured by its log.

Every variant runs in its own process, with OMP_NUM_THREADS threads if that is set, otherwise one per core. On a shared
machine, 1 is the fairer setting: threads that wait for one another lose far more than their share. Memory is
the largest resident set of that process, plus that of a worker times their number. CPU time is that of all of its
processes in the timed steps: on such a machine it is the steadier measure.
"""

import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from hashseek.retrieval.devices import n_cores, pick_device
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.config import Config, load_config
from hashseek.training.data.batches import build_source
from hashseek.training.data.datasets import Split, build_splits
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.data.training_images import Images
from hashseek.training.loop.fit import fit, initial_model, preprocessing_of
from hashseek.training.losses import build_loss
from hashseek.training.progress import Progress
from hashseek.training.runs.environment import device_name
from hashseek.training.runs.run_folder import read_records

BASE = Path("mirflickr25k_mobilenet_v2_hyp2_48_finetuned")
EPOCHS, FROZEN_EPOCHS = 4, 12
MIB = 2**20
FROZEN = Path("mirflickr25k_mobilenet_v2_hyp2_48")


# Data and configuration


def prepare(folder: Path, n: int) -> None:
    """A data set of `n` training pictures in `folder`: a part of the photographs, or drawn."""
    if "HASHSEEK_DATA" not in os.environ:
        render_shapes(folder, n_query=4, n_train=n, n_database=4, size=128)
        return
    root = Path(os.environ["HASHSEEK_DATA"]).resolve() / "mirflickr25k_128"
    with (root / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    chosen = [row for row in rows if row["split"] == "train"][:n]
    chosen += [next(row for row in rows if row["split"] == split) for split in ("query", "retrieval")]
    (folder / "images").symlink_to(root / "images")
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("file", "labels", "split"), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(chosen)


def configuration(folder: Path, *settings: str, base: Path = BASE) -> Config:
    own = [f"data.root={folder}", "data.ignore_columns=[]", "train.batch_size=50"]
    if "HASHSEEK_DATA" not in os.environ:
        own.append("model.weights=none")
    return load_config(base, [*own, *settings])


# The plain loop


class Pictures(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Opens, crops and converts a picture on each access."""

    def __init__(self, split: Split, preprocessing: Preprocessing, *, min_crop: float) -> None:
        self.split = split
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(preprocessing.size, scale=(min_crop, 1.0)),
                v2.RandomHorizontalFlip(),
                v2.PILToTensor(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(list(preprocessing.mean), list(preprocessing.std)),
            ]
        )

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        with Image.open(self.split.paths[row]) as picture:
            pixels = self.transform(picture.convert("RGB"))
        return pixels, torch.from_numpy(self.split.labels[row].astype(np.float32))


def plain_loop(folder: Path, *, frozen: bool) -> dict[str, float]:
    """Steps after the first one, which warms up."""
    config = configuration(folder, base=FROZEN if frozen else BASE)
    device = pick_device()
    model, split, loader = plain_parts(config)
    model.to(device).train()
    loss = build_loss("hyp2", n_classes=split.labels.shape[1], n_bits=model.n_bits, beta=1.0).to(device)
    learnt: list[nn.Parameter] = [*model.head.parameters(), *([] if frozen else model.backbone.parameters())]
    optimizer = torch.optim.AdamW([*learnt, *loss.parameters()], lr=1e-4)
    if frozen:
        model.backbone.eval()
        model.backbone.requires_grad_(False)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        total = torch.stack(list(loss(model(images.to(device)), labels.to(device), epoch=0).values())).sum()
        total.backward()
        optimizer.step()
        total.item()

    return timed((len(images), lambda i=images, y=labels: step(i, y)) for images, labels in loader)


def plain_pipeline(folder: Path) -> dict[str, float]:
    _, _, loader = plain_parts(configuration(folder))
    return timed((len(images), lambda: None) for images, _ in loader)


def plain_parts(config: Config) -> tuple[HashModel, Split, "DataLoader[tuple[torch.Tensor, torch.Tensor]]"]:
    model, split, preprocessing = parts(config)
    pictures = Pictures(split, preprocessing, min_crop=config.train.min_crop)
    workers = DataLoader(
        pictures, batch_size=config.train.batch_size, shuffle=True, num_workers=n_cores(), drop_last=True
    )
    return model, split, workers


def parts(config: Config) -> tuple[HashModel, Split, Preprocessing]:
    split, preprocessing = build_splits(config.data.name, **config.data.options()).train, preprocessing_of(config)
    assert preprocessing is not None
    return initial_model(config), split, preprocessing


# Ours


def ours(folder: Path, *, frozen: bool) -> dict[str, float]:
    """Epochs after the first one, in which pictures are decoded or features computed."""
    epochs = FROZEN_EPOCHS if frozen else EPOCHS
    spent: list[float] = []
    config = configuration(folder, f"train.epochs={epochs}", base=FROZEN if frozen else BASE)
    run = fit(config, out=folder / "run", on_epoch=lambda _: spent.append(cpu_seconds())).run
    log = read_records(run.log)
    seconds = sum(record["seconds"] for record in log[1:])
    n = sum(record["images_per_s"] for record in log[1:]) / len(log[1:])
    n_images = round(0.9 * len(build_splits("folder", root=str(folder)).train)) * len(log[1:])
    return {
        "images_per_s": n,
        "first_images_per_s": log[0]["images_per_s"],
        # Validation is part of an epoch: counted here, though the plain loop has none.
        "cpu_s_per_image": (spent[-1] - spent[0]) / n_images,
        "seconds": seconds,
        "waiting": sum(record["seconds_waiting_for_data"] for record in log[1:]) / seconds,
    }


def our_pipeline(folder: Path) -> dict[str, float]:
    """Batches on the device once the pictures are decoded; and the epoch before, which decodes them."""
    config = configuration(folder)
    model, split, preprocessing = parts(config)
    fabric, images, rows = Fabric(devices=1), Images(split, preprocessing), np.arange(len(split))
    source = build_source(config, model, split, images, fabric=fabric, progress=Progress(quiet=True))

    def epoch(number: int) -> Iterator[tuple[int, Callable[[], None]]]:
        for inputs, _ in source.batches(rows, config.train.batch_size, number):
            yield len(inputs), lambda inputs=inputs: inputs[0, 0, 0, 0].item()  # type: ignore[misc]

    first = timed(epoch(0))
    return {
        **timed(step for number in range(1, 5) for step in epoch(number)),
        "first_images_per_s": first["images_per_s"],
    }


# Measures


def timed(steps: Iterator[tuple[int, Callable[[], None]]]) -> dict[str, float]:
    """Images per second of all steps but the first; taking a batch out of the iterator counts."""
    _, first = next(steps)
    first()
    n, started, cpu = 0, time.perf_counter(), cpu_seconds()
    for size, step in steps:
        step()
        n += size
    seconds = time.perf_counter() - started
    # Workers are waited for when the iterator ends: their time is known by now.
    return {"images_per_s": n / seconds, "cpu_s_per_image": (cpu_seconds() - cpu) / n, "seconds": seconds}


def n_threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", n_cores()))


def cpu_seconds() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


def peak_mib() -> float:
    own, child = (resource.getrusage(kind).ru_maxrss for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (own + n_cores() * child) * 1024 / MIB


VARIANTS: dict[str, Callable[[Path], dict[str, float]]] = {
    "plain": lambda folder: plain_loop(folder, frozen=False),
    "ours": lambda folder: ours(folder, frozen=False),
    "plain, frozen backbone": lambda folder: plain_loop(folder, frozen=True),
    "ours, frozen backbone": lambda folder: ours(folder, frozen=True),
    "plain, data alone": plain_pipeline,
    "ours, data alone": our_pipeline,
}


def measure(name: str, n: int) -> dict[str, float]:
    """The figures of a variant, from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="hashseek-bench-") as place:
        folder = Path(place) / "data"
        folder.mkdir()
        prepare(folder, n)
        # Threads that wait must not spin: on a machine that others use, that alone would be most of the CPU time.
        environment = {**os.environ, "HASHSEEK_CACHE": str(Path(place) / "cache"), "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(
            (sys.executable, __file__, "--variant", name, str(folder)),
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    if "--variant" in sys.argv:
        torch.set_num_threads(n_threads())
        found = VARIANTS[sys.argv[2]](Path(sys.argv[3]))
        print(json.dumps({**found, "peak_mib": peak_mib()}))
        return
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    if n < 120:
        sys.exit(f"{n} images are too few: use at least 120, so that a batch is left after the one that warms up")
    data = "MIRFLICKR photographs" if "HASHSEEK_DATA" in os.environ else "built-in shapes"
    config = load_config(BASE)
    print(
        f"{n} {data}, {config.model.backbone}, {config.model.size} px, batch {config.train.batch_size}; "
        f"{device_name(pick_device())}, {n_threads()} threads of {n_cores()} cores, load {os.getloadavg()[0]:.1f}, "
        f"torch {torch.__version__}\n"
    )
    print("| | images/s | first epoch | waiting for data | CPU ms an image | peak memory |")
    print("|---|---:|---:|---:|---:|---:|")
    results: dict[str, Any] = {}
    for name in VARIANTS:
        one = results[name] = measure(name, n)
        first = f"{one['first_images_per_s']:,.0f}" if "first_images_per_s" in one else ""
        waiting = f"{one['waiting']:.1%}" if "waiting" in one else ""
        print(
            f"| {name} | {one['images_per_s']:,.1f} | {first} | {waiting} | {1000 * one['cpu_s_per_image']:,.1f} | "
            f"{one['peak_mib']:,.0f} MiB |",
            flush=True,
        )

    def ratio(upper: str, lower: str, key: str = "images_per_s") -> float:
        return float(results[upper][key] / results[lower][key])

    print()
    for title, value in (
        ("fine-tuning, ours to plain", ratio("ours", "plain")),
        ("the same by CPU time", ratio("plain", "ours", "cpu_s_per_image")),
        ("frozen backbone, ours to plain", ratio("ours, frozen backbone", "plain, frozen backbone")),
        ("our data alone to what our network takes", ratio("ours, data alone", "ours")),
    ):
        print(f"{title}: {value:.1f} times")
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
