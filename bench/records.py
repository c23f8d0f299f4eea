"""Records of pictures that do not exist, for benchmarks with more codes than pictures."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import NewImage


def record(number: int, code: NDArray[np.uint8], labels: Sequence[str], **details: Any) -> NewImage:
    """The record with this number, which determines its path and hash."""
    return NewImage(
        path=f"/photographs/2026/{number:08}.jpg",
        sha256=hashlib.sha256(b"%d" % number).hexdigest(),
        width=4000,
        height=3000,
        bytes=3_000_000,
        media_type="image/jpeg",
        labels=tuple(labels),
        code=code,
        **details,
    )
