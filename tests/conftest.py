"""Fixtures for all tests: drawn pictures, a tiny checkpoint, collections, and `hashseek` in processes of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side; every library reads it when it is loaded

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from indexing.catalog import NewImage, create_catalog
from indexing.collection import CATALOG, Collection
from retrieval.checkpoint import save_checkpoint
from retrieval.codes import Codes, pack
from retrieval.images import Preprocessing, normalizer, preprocess
from retrieval.model import HashModel
from training.config import Config, parse_config

torch.set_num_threads(1)

N_PICTURES = 12
PREPROCESSING = Preprocessing(size=64, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def draw(seed: int, size: tuple[int, int] = (96, 72)) -> Image.Image:
    """A picture that no other seed gives: a shaded background with figures on it."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (2, 2, 3)).astype(np.uint8)
    image = Image.fromarray(corners).resize(size, Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = (int(rng.integers(0, side)) for side in size)
        radius = int(rng.integers(6, max(7, min(size) // 3)))
        figure = pen.ellipse if rng.random() < 0.5 else pen.rectangle
        figure((x - radius, y - radius, x + radius, y + radius), fill=tuple(int(c) for c in rng.integers(0, 256, 3)))
    return image


def tiny_checkpoint(path: Path, *, n_bits: int, seed: int) -> Path:
    """An untrained SqueezeNet whose bits split the drawn pictures in halves, so that their codes differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HashModel(backbone="squeezenet1_1", n_bits=n_bits).eval()
    pixels = np.stack([preprocess(draw(i), PREPROCESSING) for i in range(N_PICTURES)])
    with torch.inference_mode():
        outputs = model(normalizer(PREPROCESSING, torch.device("cpu"))(torch.from_numpy(pixels)))
        model.head.bias -= outputs.median(dim=0).values
    save_checkpoint(path, model, PREPROCESSING, label_names=("even", "odd"))
    return path


def run_config(root: Path, **changes: Any) -> Config:
    """A tiny training run on a folder of pictures; `train={"epochs": 2}` or `train__epochs=2` changes a setting."""
    content: dict[str, dict[str, Any]] = {
        "data": {"name": "folder", "root": str(root)},
        "model": {"backbone": "squeezenet1_1", "n_bits": 12, "size": 48, "crop_fraction": 1.0},
        "optimizer": {"name": "adamw", "lr": 1e-3, "proxy_lr": 1e-2},
        "train": {"epochs": 2, "batch_size": 16, "device": "cpu", "precision": "fp32"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        content[section] = content.get(section, {}) | ({name: value} if name else value)
    return parse_config(content, source="test")


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("HASHSEEK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint of 48 bits."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny.safetensors", n_bits=48, seed=1)


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory) -> Path:
    """Another one, of 36 bits."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "other.safetensors", n_bits=36, seed=2)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """A folder of 12 pictures, JPEG and PNG, some in a subfolder with an awkward name. Not to be written to."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "Höhle, 2 °C").mkdir()
    for seed in range(N_PICTURES):
        place = folder / "Höhle, 2 °C" if seed % 4 == 3 else folder
        draw(seed).save(place / f"picture {seed:02}{'.png' if seed % 3 == 2 else '.jpg'}", quality=90)
    return folder


@pytest.fixture(scope="session")
def indexed(tmp_path_factory, checkpoint, pictures) -> Path:
    """A collection of all pictures; every picture is labelled even or odd, and multiples of 3 are `three` too."""
    from indexing.collection import open_or_create
    from indexing.ingest import Source, ingest
    from indexing.searcher import Searcher

    folder = tmp_path_factory.mktemp("indexed") / "collection"
    files = sorted(path for path in pictures.rglob("*") if path.is_file())
    sources = [Source(path, labels_of(path)) for path in files]
    collection = open_or_create(folder, checkpoint=checkpoint)
    list(ingest(collection, Searcher.open(collection, device="cpu").encoder, sources))
    collection.save_index()
    collection.close()
    return folder


def labels_of(path: Path) -> tuple[str, ...]:
    """Labels of a drawn picture."""
    seed = int(path.stem.split()[-1])
    return ("odd" if seed % 2 else "even", *(("three",) if seed % 3 == 0 else ()))


@pytest.fixture
def own_collection(indexed, tmp_path) -> Path:
    """A copy of `indexed` that a test may change."""
    of_readers = shutil.ignore_patterns("*-wal", "*-shm")  # tests that read `indexed` just now
    return shutil.copytree(indexed, tmp_path / "collection", ignore=of_readers)


def random_codes(rng: np.random.Generator, n: int, n_bits: int, n_distinct: int | None = None) -> Codes:
    """Packed codes; with `n_distinct`, so few different ones that equal distances are the rule."""
    codes = pack(rng.standard_normal((n_distinct or n, n_bits)))
    return codes if n_distinct is None else codes[rng.integers(0, n_distinct, n)]


def new_images(codes: Codes, *, start: int = 0, labels: tuple[str, ...] = ()) -> list[NewImage]:
    """Records of images that exist in a catalog only, numbered from `start`."""
    return [
        NewImage(f"/nowhere/{i}.jpg", f"{i:064x}", 10, 20, 30, "image/jpeg", labels, code)
        for i, code in enumerate(codes, start=start)
    ]


def code_collection(folder: Path, *, n_bits: int) -> Collection:
    """An empty collection without a checkpoint: enough for codes that no model made."""
    folder.mkdir(parents=True, exist_ok=True)
    create_catalog(folder / CATALOG, fingerprint="f" * 64, n_bits=n_bits)
    return Collection(folder)


# A process that has loaded everything once and forks one child per command: as real as a process can be, and twenty
# times as quick to start. The parent of the command stays to note how it ended.
_NURSERY = """
import ctypes, gc, json, os, signal, sys, traceback
import numpy, indexing.commands.collection, api.serve, api.service
import torch; torch.set_num_threads(1)
from api.cli import main

def drop_rights():
    "Root may write anywhere by two capabilities; without them the mode of files and folders counts."
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for i in range(3):
        sets[i] &= ~0b110 & 0xFFFFFFFF
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())

def in_order(code):
    gc.unfreeze()
    sys.exit(code)

gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if os.fork():
        continue
    task = json.loads(line)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        with open(task["folder"] + "/pid.new", "w") as file: file.write(str(child))
        os.rename(task["folder"] + "/pid.new", task["folder"] + "/pid")
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with open(task["folder"] + "/code.new", "w") as file: file.write(str(code))
        os.rename(task["folder"] + "/code.new", task["folder"] + "/code")
        os._exit(0)
    for number, name in enumerate(("/dev/null", "out", "err")):
        handle = os.open(os.path.join(task["folder"], name), os.O_RDWR | os.O_CREAT, 0o644)
        os.dup2(handle, number)
    sys.stdin = open(0); sys.stdout = open(1, "w"); sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")
    os.chdir(task["folder"])
    finish = os._exit  # taking every library down takes a second; `before` may ask for it by finish = in_order
    try:
        exec(task["before"])
        main(task["arguments"])
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    finish(code or 0)
"""


@dataclass
class Command:
    """A `hashseek` command in a process of its own."""

    folder: Path

    @property
    def pid(self) -> int:
        wait_until((self.folder / "pid").exists)
        return int((self.folder / "pid").read_text())

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text() if (self.folder / "out").exists() else ""

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text() if (self.folder / "err").exists() else ""

    @property
    def ended(self) -> bool:
        return (self.folder / "code").exists()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = 120) -> int:
        """Its exit code, or minus the signal that killed it."""
        wait_until(lambda: self.ended, seconds)
        return int((self.folder / "code").read_text())


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait for a condition; generous, since other work may be going on."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """The process that starts commands."""
    with subprocess.Popen([sys.executable, "-c", _NURSERY], stdin=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def start(nursery, tmp_path_factory) -> Iterator[Callable[..., Command]]:
    """Start `hashseek` with arguments; `before` is Python code that runs in the process first, to inject faults."""
    started: list[Command] = []

    def start_command(*arguments: object, before: str = "") -> Command:
        command = Command(tmp_path_factory.mktemp("command"))
        task = {"folder": str(command.folder), "arguments": [str(a) for a in arguments], "before": before}
        nursery.stdin.write(json.dumps(task) + "\n")
        nursery.stdin.flush()
        started.append(command)
        return command

    yield start_command
    for command in started:
        if not command.ended:
            command.send(signal.SIGKILL)
            command.wait()


@pytest.fixture
def hashseek(start) -> Callable[..., tuple[int, str, str]]:
    """Run `hashseek` with arguments to its end: (exit code, standard output, standard error)."""

    def run(*arguments: object, before: str = "") -> tuple[int, str, str]:
        command = start(*arguments, before=before)
        return command.wait(), command.out, command.err

    return run


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of one megabyte."""
    place = tmp_path / "small disk"
    place.mkdir()
    mount: Sequence[str] = ("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place))
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk to fill it")
    yield place
    subprocess.run(("umount", "--lazy", str(place)), check=True)
