"""One or several processes, and the share of each: Lightning Fabric sets devices and precision.

They are started here (`--devices`) or by torchrun, also on several hosts, and behave the same from then on.
"""

import logging
import pickle
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.spawn import ProcessExitedException

from hashseek.retrieval.devices import in_bf16, n_cores, n_threads, pick_device
from hashseek.retrieval.errors import BadConfig, HashseekError
from hashseek.retrieval.process_exit import skip_gc_at_exit
from hashseek.training.torchrun import Torchrun, torchrun

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)  # as PyTorch's

# It prints its precision and every process to standard error, where this run prints its progress.
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)


def launch(function: Callable[..., T], *arguments: Any, device: str, devices: int, precision: str) -> T:
    """Call function(fabric, *arguments) in `devices` processes, or in this one if it is 1; returns rank 0's result.

    A process that torchrun started is one of `devices`: it calls the function itself, and returns its own result.

    Raises:
        BadConfig: the machine has fewer devices, torchrun started a different number of processes, or this is a
            notebook and should start others.
        HashseekError, OSError: whatever the function raised in any process; under torchrun, in this one.
    """
    chosen = pick_device(device)
    started = torchrun()
    if started is not None and started.n_processes != devices:
        raise BadConfig(
            f"train.devices is {devices}, but torchrun started {started.n_processes} processes: set it to that number"
        )
    check_devices(chosen, devices if started is None else started.n_here)
    mixed = in_bf16(precision, cpu=chosen.type == "cpu")
    options: dict[str, Any] = {"accelerator": chosen.type, "precision": "bf16-mixed" if mixed else "32-true"}
    if started is None:  # Fabric would take the variables of a Slurm job for processes that Slurm started
        options["plugins"] = [LightningEnvironment()]
    if devices == 1:
        if chosen.type == "cpu":
            torch.set_num_threads(n_threads())
        fabric = Fabric(devices=1 if chosen.type == "cpu" else [chosen.index or 0], **options)
        return function(fabric, *arguments)
    if started is not None:
        fabric = Fabric(devices=started.n_here, num_nodes=started.n_hosts, strategy="ddp", **options)
        _join_group(started, fabric.device)
        own: T = fabric.launch(partial(_in_group, function=function, arguments=arguments))
        return own
    if hasattr(sys, "ps1") or sys.flags.interactive:  # Fabric would refuse it
        raise BadConfig(
            f"train.devices is {devices}, which does not work in a notebook or an interactive Python: set it to 1, or "
            f"run `hashseek train ... --devices {devices}` in a terminal (`!hashseek train` in a notebook)"
        )
    fabric = Fabric(devices=devices, strategy="ddp_spawn", **options)
    with tempfile.TemporaryDirectory(prefix="hashseek-") as folder:
        try:
            result: T = fabric.launch(partial(_guarded, function=function, folder=Path(folder), arguments=arguments))
        except Exception as error:
            # A process that fails ends the others too; the first error is in its file.
            for file in sorted(Path(folder).glob("error-*")):
                raise pickle.loads(file.read_bytes()) from None
            if not isinstance(error, ProcessExitedException):
                raise
            raise HashseekError(_failure(error, devices)) from None
    return result


def _join_group(place: Torchrun, device: torch.device) -> None:
    """Connect the processes that torchrun started together; Fabric takes this group over."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    store, _, _ = next(rendezvous("env://", timeout=_TIMEOUT))
    store = PrefixStore(_agreed_name(place, store), store)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.n_processes,
        timeout=_TIMEOUT,
        device_id=device if on_gpu else None,
    )


def _agreed_name(place: Torchrun, store: Store) -> str:
    """A random name chosen by the first process, the same in all live processes.

    torchrun's store outlives a restart, and the addresses of dead processes in it would be dialled again
    (https://github.com/pytorch/pytorch/issues/135712). Under a new name there are none. The store may still
    hold the name of an earlier start, so each process asks under the name that it finds, and takes it once the first
    process, which answers only under its own name, has answered.
    """
    own = uuid4().hex
    if place.rank == 0:
        store.set("hashseek", own)
        for rank in range(1, place.n_processes):
            store.set(store.get(f"{own}/{rank}").decode(), "")  # `get` waits for the process
        return own
    while True:
        name: str = store.get("hashseek").decode()
        store.set(f"{name}/{place.rank}", own)
        with suppress(dist.DistStoreError):
            store.wait([own], timedelta(seconds=1))
            return name


def _failure(error: ProcessExitedException, devices: int) -> str:
    how = f"was killed by {error.signal_name}" if error.signal_name else f"exited with status {error.exit_code}"
    return (
        f"training process {error.error_index} of {devices} {how}: if the system ran out of memory (see its "
        "log), use a smaller train.chunk_size or fewer devices; --resume continues after the last saved epoch"
    )


def check_devices(device: torch.device, devices: int) -> None:
    """Raise `BadConfig` unless this machine has that many devices."""
    available = torch.cuda.device_count() if device.type == "cuda" else n_cores()
    if devices > available:
        kind = "GPUs" if device.type == "cuda" else "processor cores"
        raise BadConfig(
            f"{devices} devices were requested, but this machine has {available} {kind}: use at most {available} "
            "(--devices, or --nproc-per-node of torchrun)"
        )


def _guarded(fabric: Fabric, *, function: Callable[..., T], folder: Path, arguments: tuple[Any, ...]) -> T:
    skip_gc_at_exit()
    try:
        return _in_group(fabric, function=function, arguments=arguments)
    except (HashseekError, OSError) as error:
        (folder / f"error-{fabric.global_rank}").write_bytes(pickle.dumps(error))
        raise


def _in_group(fabric: Fabric, *, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    if fabric.device.type == "cpu":
        torch.set_num_threads(max(1, n_cores() // fabric.strategy.num_processes))  # type: ignore[attr-defined]
    result = function(fabric, *arguments)
    # Fabric leaves a gloo group open, and its threads can abort an interpreter that closes down (seen once in CI:
    # "terminate called without an active exception"); without the barrier, a death would also end those still at work.
    fabric.barrier()
    dist.destroy_process_group()
    return result


def n_batches(n: int, *, batch_size: int, n_ranks: int) -> int:
    """Batches in an epoch of `n` images; `validation_part` leaves at least two, and one for each process.

    A last batch with fewer images than processes, or with one image, is left out: batch norm has no statistics of one
    image, and pair losses have no pair.
    """
    n_full, rest = divmod(n, batch_size)
    return n_full + (rest >= max(2, n_ranks))


def own_part(order: NDArray[Any], *, batch_size: int, rank: int, n_ranks: int) -> NDArray[Any]:
    """The rows of `order` that process `rank` works on: its share of each batch of `n_batches`."""
    stop = batch_size * n_batches(len(order), batch_size=batch_size, n_ranks=n_ranks)
    batches = [order[start : start + batch_size] for start in range(0, stop, batch_size)]
    bounds = [(len(rows) * rank // n_ranks, len(rows) * (rank + 1) // n_ranks) for rows in batches]
    return np.concatenate([rows[first:last] for rows, (first, last) in zip(batches, bounds, strict=True)])
