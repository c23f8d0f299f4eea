"""Which device and precision to compute with, and how many processor cores there are.

torch is imported inside the functions that need it, because that takes seconds.
"""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

from hashseek.retrieval.errors import BadConfig

if TYPE_CHECKING:
    import torch

PrecisionName = Literal["auto", "fp32", "bf16"]
EngineName = Literal["auto", "torch", "openvino"]
PRECISIONS, ENGINES = get_args(PrecisionName), get_args(EngineName)
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # of this container: microseconds of CPU time per period, and the period


class EncoderOptions(TypedDict, total=False):
    """Where and how to encode: keyword arguments of `Encoder` that commands and the service pass on."""

    device: str
    precision: str
    engine: str


def pick_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" selects a GPU if there is one.

    Raises:
        BadConfig: the name is unknown, of another kind of device, or this machine has no such device.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise BadConfig(f"there is no device {name!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadConfig(
            f"there is no device {name}: this machine has {torch.cuda.device_count()} GPUs; use auto or cpu"
        )
    return device


def is_cpu(name: str) -> bool:
    """Whether `pick_device` returns the CPU. torch is imported only if this machine may have a GPU.

    Raises:
        BadConfig: see `pick_device`.
    """
    if name == "cpu" or (name == "auto" and not _may_have_gpu()):
        return True
    return pick_device(name).type == "cpu"


def _may_have_gpu() -> bool:
    """False only if Linux certainly has no device that torch could use: NVIDIA's, a Jetson's, AMD's, or one of WSL."""
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in ("nvidia*", "nvhost*", "kfd", "dxg"))


def in_bf16(precision: str, *, cpu: bool) -> bool:
    """Whether a backbone runs in bf16 instead of float32.

    Args:
        precision: "fp32", "bf16", or "auto": the faster one on this device.
        cpu: whether the device is the CPU.

    Raises:
        BadConfig: there is no such precision.
    """
    if precision not in PRECISIONS:
        raise BadConfig(f"there is no precision {precision!r}: use one of {', '.join(PRECISIONS)}")
    if precision != "auto":
        return precision == "bf16"
    if cpu:
        return fast_bf16()
    import torch

    return bool(torch.cuda.is_bf16_supported(including_emulation=False))  # emulation is slow


def fast_bf16() -> bool:
    """Whether this processor computes every backbone measured (docs/benchmarks.md) faster in bf16 than in float32.

    Those with AMX do, and AMD's with AVX512_BF16; Intel's with AVX512_BF16 alone do not. It is not measured at
    start-up: on a busy machine the choice would vary, and one collection should have codes of one precision.
    """
    features = cpu_features()
    return "amx_bf16" in features or {"avx512_bf16", "AuthenticAMD"} <= features


def n_threads() -> int:
    """Threads of an encoder: as many as torch uses if it is loaded, otherwise OMP_NUM_THREADS; at most one per core."""
    if "torch" in sys.modules:  # which knows nothing of the limit of a container
        return min(int(sys.modules["torch"].get_num_threads()), n_cores())
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(max(1, int(wanted)), n_cores()) if wanted.isdecimal() else n_cores()


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


def cpu_features() -> frozenset[str]:
    """The processor's vendor and instruction sets, such as "AuthenticAMD" and "avx512_vnni"; empty without Linux."""
    return frozenset(f"{_cpu().get('vendor_id', '')} {_cpu().get('flags', '')}".split())


def cpu_name() -> str:
    """The model name of the processor."""
    return _cpu().get("model name") or platform.processor() or platform.machine()


@cache
def _cpu() -> dict[str, str]:
    """What Linux knows about the processor, by name; nothing on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
