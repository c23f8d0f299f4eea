"""Sets of numbers as ascending arrays."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def union(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The numbers (ascending, each once) that are in one of the parts; `np.unique` takes many times as long."""
    numbers = np.sort(np.concatenate(parts), kind="stable") if parts else np.zeros(0, np.int64)
    new = np.ones(len(numbers), bool)
    np.not_equal(numbers[1:], numbers[:-1], out=new[1:])
    return numbers[new]
