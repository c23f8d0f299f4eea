"""Small disks, which a test can fill."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk_at(place: Path, *, megabytes: int) -> Iterator[Path]:
    """Mount a disk of that size at the new folder `place`, or skip the test."""
    place.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place))
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk to fill it")
    try:
        yield place
    finally:
        subprocess.run(("umount", "--lazy", str(place)), check=True)
