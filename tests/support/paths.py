"""Where the repository is, and copies of collections."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copy_collection(folder: Path, copy: Path) -> Path:
    """Copy the folder of a collection without the files of processes that have it open."""
    return shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-wal", "*-shm", "*-writer"))
