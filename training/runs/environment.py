"""The environment of a run: versions, device, git state and command line, but no host or user name."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hashseek.retrieval.devices import cpu_name, n_cores

PACKAGES = ("hashseek", "torch", "torchvision", "numpy", "lightning-fabric", "pillow", "timm")
_CODE = Path(__file__).resolve().parents[2]


def environment(device: torch.device, *, devices: int) -> dict[str, Any]:
    """Versions, device, cores, git state of the code, and command line of this process."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "python": platform.python_version(),
        **_versions(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
        "devices": devices,
        "cores": n_cores(),
        "git": git_state(_CODE),
    }


def command_line() -> str:
    """The command line of this process: the program without its folder, or its package after `python -m`."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c") else "python"
    if program == "__main__.py":
        program = sys.modules["__main__"].__package__ or program
    return shlex.join([program, *sys.argv[1:]])


def device_name(device: torch.device) -> str:
    """The model name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


@cache
def git_state(code: Path) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the git checkout at `code`; None if it is not a checkout, or git is missing."""
    if not (code / ".git").exists():
        return None
    commit = _git(code, "rev-parse", "HEAD")
    changes = _git(code, "status", "--porcelain")
    return None if commit is None else {"commit": commit.strip(), "dirty": changes is None or bool(changes.strip())}


@cache
def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _git(code: Path, *arguments: str) -> str | None:
    try:
        # Without locks, because someone may be working in the checkout.
        done = subprocess.run(
            ("git", "--no-optional-locks", "-C", str(code), *arguments),
            capture_output=True,
            text=True,
            timeout=10,
            env={**os.environ, "LC_ALL": "C"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
