"""Encodes images with the processes of a Ray cluster, in shards that survive crashes.

The sources are cut into shards, which depend on nothing but the sources. A worker encodes a shard as `index add` does,
and this process writes the returned Parquet file atomically, under a name that identifies its content. Finished files
are skipped on the next run; the shard of a worker that dies is given to another one. The pictures must have the same
paths on all machines of the cluster, which need Hashseek installed; nothing else is shared.
"""

import hashlib
import json
import math
import os
import re
import signal
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hashseek.indexing.catalog import NewImage
from hashseek.indexing.ingest.loading import Fetch, LoadedImage, Loader
from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.sources import Found
from hashseek.indexing.maintenance.exchange import FORMAT, shard
from hashseek.indexing.opening import Store
from hashseek.indexing.uris import is_there, stamp_of
from hashseek.retrieval.devices import EncoderOptions, n_cores
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig, HashseekError, first_line
from hashseek.retrieval.files import write_atomically
from hashseek.retrieval.images import Pixels
from hashseek.retrieval.label_files import Problem

_OBJECT_STORE = 2**28  # bytes; a shard with its codes has less than a thousandth
_TRIES = 5  # for a shard whose worker dies
_START_SECONDS = 300.0  # workers may take this long to start while none is working

_OWN = re.compile(r"(?:\d{7,}-)?([0-9a-f]{32})\.parquet")  # the file name of a shard

_Part = tuple[str, list[Found]]  # name and images of a shard


@dataclass(frozen=True)
class Cluster:
    """Which Ray cluster to use, and how much of it.

    Args:
        address: "local" starts one here; HOST:PORT is one that is running.
        workers: number of processes; None: as many as fit.
        cpus, gpus: of each; parts of a GPU such as 0.25 are shared.
    """

    address: str
    workers: int | None = None
    cpus: float = 1
    gpus: float = 0

    def check(self) -> None:
        """Raise `BadConfig` unless Ray is installed, the values are valid, and Ray listens at `address`."""
        if find_spec("ray") is None:
            raise BadConfig("--ray needs the package ray: run pip install 'hashseek[ray]'")
        if self.gpus > 1 and self.gpus % 1:
            raise BadConfig(f"--ray-gpus must be a fraction such as 0.25 or a whole number, got {self.gpus}")
        if self.address == "local":
            return
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        if not host or not port.isdecimal():
            raise BadConfig(f"--ray must be local or HOST:PORT, as `ray start` prints it, got {self.address!r}")
        try:  # Ray itself would try for two minutes and end the process
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise self._not_connected(error) from None

    def _not_connected(self, error: Exception) -> BadConfig:
        if self.address == "local":
            return BadConfig(f"could not start Ray on this machine ({first_line(error)}): try again, or without --ray")
        return BadConfig(
            f"could not connect to a Ray cluster at {self.address!r} ({first_line(error)}): check the address, "
            "and the token if the cluster needs one (RAY_AUTH_MODE=token), or use --ray local to start one"
        )

    def connect(self) -> int:
        """Connect to Ray; returns the number of workers.

        Raises:
            BadConfig: Ray cannot be reached there, or refuses the token, or no worker fits.
        """
        import ray

        options: dict[str, Any] = {}
        if self.address == "local":
            # By default Ray would send usage statistics, and run at a lower priority than other processes.
            os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"} | os.environ
            cpus = max(n_cores(), math.ceil((self.workers or 0) * self.cpus))
            options = {"num_cpus": cpus, "object_store_memory": _OBJECT_STORE, "include_dashboard": False}
        handler = signal.getsignal(signal.SIGTERM)
        # Start Ray here twice if necessary: on a busy machine, it may take longer than the 30 s that it allows itself.
        for is_last in (self.address != "local", True):
            try:
                ray.init(self.address, log_to_driver=False, logging_level="error", **options)
                break
            except Exception as error:  # Ray raises no narrower class
                if is_last:
                    raise self._not_connected(error) from None
        with suppress(ValueError):  # this is not the main thread
            signal.signal(signal.SIGTERM, handler)  # Ray's would abort
        found = ray.cluster_resources()
        each = {"CPU": self.cpus, "GPU": self.gpus}
        fit = min(int(found.get(kind, 0) / amount) for kind, amount in each.items() if amount)
        if fit < (self.workers or 1):
            raise BadConfig(
                f"the cluster has {found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs, too few for "
                f"--ray-workers {self.workers or 1} with --ray-cpus {self.cpus:g} and --ray-gpus {self.gpus:g}: "
                "lower one of these"
            )
        return self.workers or fit


def encode_shards(
    sources: Iterable[Found],
    folder: Path,
    *,
    collection: Store,
    cluster: Cluster,
    options: EncoderOptions,
    fetch: "partial[bytes]",
    shard_size: int,
    stopped: Callable[[], bool],
    progress: Callable[[int, str], None],
) -> list[Path]:
    """Encode images into Parquet files in `folder`; returns these in the order of the sources, or none if stopped.

    Shards of other sources are deleted at the end, so that the folder's shards hold these images and no others.

    Args:
        sources: what to encode.
        folder: created with the first file if it is missing.
        collection: its checkpoint encodes.
        cluster: what computes.
        options: where and how the workers encode; without a GPU, the device "auto" is the CPU.
        fetch: see `ingest`; shards with URLs that were encoded with other settings of it are encoded again.
        shard_size: images in a file, on average.
        stopped: asked before each shard whether to stop.
        progress: called with the number of images done and a text about the shards.

    Raises:
        BadConfig: there is no such cluster.
        HashseekError: a shard lost its worker several times, or no worker is left.
    """
    if options["device"] == "auto":
        options = {**options, "device": "cuda" if cluster.gpus else "cpu"}
    if options["engine"] == "auto":  # what it means must not depend on the host
        options = {**options, "engine": os.environ.get("HASHSEEK_ENGINE", "auto")}
    what = [FORMAT, collection.fingerprint, *options.values()]
    finished = {found[1]: file for file in folder.glob("*.parquet") if (found := _OWN.fullmatch(file.name))}
    sizes: dict[str, int] = {}
    n_done = 0

    def missing() -> Iterator[_Part]:
        nonlocal n_done
        for found in _shards(map(_checked, sources), shard_size):
            if stopped():
                return
            name = _name(found, what, fetch)
            sizes[name] = len(found)
            if name in finished:
                n_done += len(found)
            else:
                yield name, found

    for name, content in _encoded(missing(), collection.checkpoint, cluster, options, fetch):
        finished[name] = folder / f"{name}.parquet"
        write_atomically(finished[name], content)
        n_done += sizes[name]
        progress(n_done, f", {len(sizes):,} shards")
    if stopped():
        return []
    for name in finished.keys() - sizes.keys():
        finished[name].unlink()
    # An import reads files by name: in the order of the sources, the result is the same collection.
    return [
        finished[name].replace(folder / f"{number:07}-{name}.parquet") for number, name in enumerate(sizes, start=1)
    ]


def _checked(found: Found) -> Found:
    """A problem for an image that this machine does not see either, such as a link to nothing."""
    if isinstance(found, ImageSource) and not is_there(str(found.uri)):
        return Problem(found.name, "does not exist", uri=str(found.uri), missing=True)
    return found


def _shards(sources: Iterable[Found], size: int) -> Iterator[list[Found]]:
    """The sources in parts of about `size`.

    The hash of a place decides where a part ends, so a new image changes only its own part, not all later ones.
    """
    part: list[Found] = []
    for found in sources:
        if isinstance(found, ImageSource) and isinstance(found.uri, Path):
            found = replace(found, uri=found.uri.absolute())  # a worker has another working directory
        part.append(found)
        is_end = isinstance(found, ImageSource) and zlib.crc32(os.fsencode(str(found.uri))) % size == 0
        if is_end or len(part) == 4 * size:
            yield part
            part = []
    if part:
        yield part


def _name(part: Sequence[Found], what: Sequence[object], fetch: "partial[bytes]") -> str:
    """A hash of everything that the file of a shard depends on."""
    digest = hashlib.sha256(json.dumps(what).encode())
    for found in part:
        is_url = isinstance(found, ImageSource) and isinstance(found.uri, str)
        stamp = fetch.keywords if is_url else stamp_of(found.uri) if isinstance(found, ImageSource) else None
        digest.update(repr((replace(found, where=""), stamp)).encode())  # a line may move in its list
    return digest.hexdigest()[:32]


def _encoded(
    parts: Iterator[_Part],
    checkpoint: Path,
    cluster: Cluster,
    options: EncoderOptions,
    fetch: Fetch,
) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each shard, in the order in which they are finished."""
    first = next(parts, None)
    if first is None:
        return  # nothing is left, so Ray is not needed
    import ray

    n_workers = cluster.connect()
    try:
        worker = ray.remote(num_cpus=cluster.cpus, num_gpus=cluster.gpus)(_Worker)
        start = partial(worker.remote, options, fetch, max(1, int(cluster.cpus)))
        weights = [ray.put(checkpoint.read_bytes())]  # in a list, so that a worker fetches them only once
        yield from _Pool(start, n_workers, weights).encode(chain([first], parts))
    finally:
        ray.shutdown()


class _Pool:
    """Workers that encode shards. One that dies is replaced by another, which starts when the cluster has room."""

    def __init__(self, start: Callable[[], Any], n_workers: int, weights: list[Any]) -> None:
        self._start, self._weights = start, weights
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[Any, _Part | None]] = {}  # a worker and its shard, or None if it starts
        self._lost: list[_Part] = []
        self._deaths = Counter[str]()  # by the name of the shard; "" while starting
        for _ in range(n_workers):
            self._add_worker()

    def _add_worker(self) -> None:
        worker = self._start()
        self._running[worker.__ray_ready__.remote()] = worker, None

    def encode(self, parts: Iterator[_Part]) -> Iterator[tuple[str, bytes]]:
        """(name, content) of each shard, in the order in which they are finished."""
        import ray

        while True:
            while self._idle and (part := self._lost.pop() if self._lost else next(parts, None)) is not None:
                worker = self._idle.pop()
                self._running[worker.encode.remote(self._weights, part[1])] = worker, part
            is_encoding = any(part is not None for _, part in self._running.values())
            if self._idle and not is_encoding:
                return
            done, _ = ray.wait(list(self._running), timeout=None if is_encoding else _START_SECONDS)
            if not done:
                raise HashseekError(
                    f"no worker started within {_START_SECONDS:.0f} s: check `ray status`; finished shards are kept"
                )
            worker, part = self._running.pop(done[0])
            try:
                content = ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:  # the worker or its machine
                self._replace_worker(part, error)
                continue
            self._idle.append(worker)
            if part is not None:
                yield part[0], content

    def _replace_worker(self, part: _Part | None, error: Exception) -> None:
        name = "" if part is None else part[0]
        self._deaths[name] += 1
        if self._deaths[name] == _TRIES:
            raise HashseekError(
                f"workers died {_TRIES} times {'with the same shard' if name else 'while starting'} "
                f"({str(error).splitlines()[-1][:160]}): check Ray's logs and the memory there; fewer workers "
                "(--ray-workers) and smaller shards (--shard-size) need less; finished shards are kept"
            )
        if part is not None:
            self._lost.append(part)
        self._add_worker()


class _Worker:
    """Encodes shards in a process of its own."""

    def __init__(self, options: EncoderOptions, fetch: Fetch, threads: int) -> None:
        self.options, self.fetch, self.threads = options, fetch, threads
        self.encoder: Encoder | None = None

    def encode(self, checkpoint: list[Any], found: list[Found]) -> bytes:
        """The Parquet file of a shard."""
        files = [str(one.uri) for one in found if isinstance(one, ImageSource)]
        if files and not any(map(is_there, files)):
            raise HashseekError(  # not a problem of each image, which would be kept in the file of the shard
                f"the worker on {socket.gethostname()} sees none of {len(files):,} files, such as {files[0]}: "
                "mount their disk there under the same path"
            )
        encoder = self.encoder = self.encoder or self._load(checkpoint)
        loader = Loader(None, encoder, self.fetch)
        images, problems = list[NewImage](), list[Problem]()
        for step, code in encoder.stream(loader.load(found), _with_pixels, encoder.encode_pixels):
            if isinstance(step, Problem):
                problems.append(step)
            elif step.image is not None and code is not None:
                images.append(replace(step.image, code=code, engine=encoder.engine))
        return shard(images, problems, fingerprint=encoder.fingerprint, n_bits=encoder.n_bits)

    def _load(self, checkpoint: list[Any]) -> Encoder:
        import ray
        import torch

        from hashseek.retrieval.checkpoint import load_checkpoint

        torch.set_num_threads(self.threads)
        with TemporaryDirectory(prefix="hashseek-") as folder:
            file = Path(folder) / "checkpoint.safetensors"
            file.write_bytes(ray.get(checkpoint[0]))
            return Encoder(load_checkpoint(file), **self.options)


def _with_pixels(step: LoadedImage | Problem) -> tuple[LoadedImage | Problem, Pixels | None]:
    return step, step.pixels if isinstance(step, LoadedImage) else None
