"""Which device and precision to compute with, and how many processor cores there are.

torch is imported inside the functions: commands that only need `n_cores` start without it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from hashseek.retrieval.errors import BadConfig

if TYPE_CHECKING:
    import torch

PRECISIONS = ("auto", "fp32", "bf16")
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # of this container: microseconds of CPU time per period, and the period


class EncoderOptions(TypedDict, total=False):
    """Where and how to encode: keyword arguments of `Encoder` that commands and the service pass on."""

    device: str
    precision: str
    engine: str


def pick_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" selects a GPU if there is one.

    Raises:
        BadConfig: the name is unknown or this machine has no such device.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadConfig(f"there is no device {name!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadConfig(
            f"there is no device {name}: this machine has {torch.cuda.device_count()} GPUs; use auto or cpu"
        )
    return device


def pick_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The data type for training: "fp32", "bf16", or "auto" (bf16 if the hardware supports it).

    Raises:
        BadConfig: there is no such precision.
    """
    import torch

    if precision not in PRECISIONS:
        raise BadConfig(f"there is no precision {precision!r}: use one of {', '.join(PRECISIONS)}")
    if precision == "auto":  # without bf16 matrix units, bf16 is slower than float32
        on_gpu = device.type == "cuda"
        fast = torch.cuda.is_bf16_supported() if on_gpu else bool({"avx512_bf16", "amx_bf16"} & cpu_flags())
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if precision == "bf16" else torch.float32


def pick_inference_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The data type for encoding: "fp32", "bf16", or "auto", the faster one on this device.

    On a CPU, "auto" is bf16 with AMX and float32 without, for every backbone measured (docs/benchmarks.md). It is not
    measured at start-up: on a busy machine the choice would vary, and one collection should have codes of one engine.
    """
    import torch

    if precision == "auto" and device.type == "cpu":
        return torch.bfloat16 if "amx_bf16" in cpu_flags() else torch.float32
    return pick_dtype(precision, device)


def n_cores() -> int:
    """Processors that this process may use: by its affinity, and by the limit of its container."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, _cpu_limit(CPU_MAX) or available)


@cache
def _cpu_limit(file: Path) -> int | None:
    """Whole processors that a file `cpu.max` of Linux (cgroup v2) grants, at least 1; None: no limit."""
    try:
        quota, period = map(int, file.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # there is none, or it is "max 100000"
        return None
    return max(1, quota // period)


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of the processor, such as "avx512_vnni"; empty where Linux does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
