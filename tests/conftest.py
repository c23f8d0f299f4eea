"""Fixtures for all tests: drawn pictures, a tiny checkpoint, collections, and `hashseek` in processes of its own."""

import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side; every library reads it when it is loaded
os.environ["HASHSEEK_ENGINE"] = "torch"  # converting a network takes a second; tests/retrieval/test_engines.py does

import absl.logging
import pytest
import torch

from support import milvus_server
from support.commands import Command, command_starter
from support.disks import small_disk_at
from support.models import squeezenet_weights, tiny_checkpoint
from support.paths import copy_collection
from support.pictures import N_PICTURES, draw, labels_of

torch.set_num_threads(1)
# OpenVINO imports absl, whose log handler closes its stream when another library, such as pymilvus, configures
# logging. By default, that would be the stream with which pytest captures the output.
absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)
# A shell that starts the tests in the background has SIGINT ignored, and the commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_of_session(tmp_path_factory) -> Iterator[None]:
    """A cache for all tests of this process, instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HASHSEEK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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
def weights(tmp_path_factory) -> Path:
    """Weights of a SqueezeNet that was never trained."""
    return squeezenet_weights(tmp_path_factory.mktemp("weights") / "squeezenet.safetensors")


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
    from hashseek.indexing.collection import open_or_create
    from hashseek.indexing.ingest.batch import ImageSource, ingest
    from hashseek.indexing.searcher import Searcher

    folder = tmp_path_factory.mktemp("indexed") / "collection"
    files = sorted(path for path in pictures.rglob("*") if path.is_file())
    sources = [ImageSource(path, labels_of(path)) for path in files]
    collection = open_or_create(folder, checkpoint=checkpoint)
    list(ingest(collection, Searcher.open(collection, device="cpu").encoder, sources))
    collection.save_index()
    collection.close()
    return folder


@pytest.fixture
def own_collection(indexed, tmp_path) -> Path:
    """A copy of `indexed` that a test may change."""
    return copy_collection(indexed, tmp_path / "collection")


@pytest.fixture(scope="session")
def starter() -> Iterator[Callable[..., Command]]:
    """Starts commands."""
    with command_starter() as start:
        yield start


@pytest.fixture
def start(starter, tmp_path_factory) -> Iterator[Callable[..., Command]]:
    """Start `hashseek` with arguments; `before` is Python code that runs in the process first, to inject faults."""
    started: list[Command] = []

    def start_command(*arguments: object, before: str = "") -> Command:
        started.append(starter(tmp_path_factory.mktemp("command"), *arguments, before=before))
        return started[-1]

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


@pytest.fixture(scope="session")
def milvus_process(tmp_path_factory) -> Iterator[milvus_server.MilvusServer]:
    """A Milvus server of the tests."""
    if reason := milvus_server.missing():
        pytest.skip(reason)
    with milvus_server.running(tmp_path_factory.mktemp("milvus")) as server:
        yield server


@pytest.fixture(scope="session")
def milvus(request) -> str:
    """The URI of a Milvus server, without the name of a collection."""
    if given := os.environ.get("HASHSEEK_MILVUS_URI"):
        return given.rstrip("/")
    return str(request.getfixturevalue("milvus_process").uri)


@pytest.fixture
def milvus_name(milvus) -> Iterator[str]:
    """The URI of a collection of this test's own, which does not exist yet."""
    import pymilvus

    name = f"test_{uuid.uuid4().hex}"
    yield f"{milvus}/{name}"
    client = pymilvus.MilvusClient(uri=milvus.replace("milvus://", "http://"))
    client.drop_collection(name)
    client.close()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of one megabyte."""
    with small_disk_at(tmp_path / "small disk", megabytes=1) as place:
        yield place
