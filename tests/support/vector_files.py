"""Vectors as another program would leave them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WIDTH = 24


def clustered(n: int, *, seed: int = 0) -> NDArray[np.float32]:
    """Vectors around eight centres, of lengths other than 1."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((8, WIDTH))
    rows = centres[rng.integers(0, 8, n)] + 0.6 * rng.standard_normal((n, WIDTH))
    return (rows * rng.uniform(0.5, 20, (n, 1))).astype(np.float32)


def save_vectors(folder: Path, vectors: NDArray, *, name: str = "vectors") -> tuple[Path, Path]:
    """An .npy file and a list with ids, labels and an attribute."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{name}.npy", vectors)
    lines = [f"v{i},{'even' if i % 2 == 0 else 'odd;other'},{2000 + i % 5}\n" for i in range(len(vectors))]
    (folder / f"{name}.csv").write_text("id,labels,year\n" + "".join(lines))
    return folder / f"{name}.npy", folder / f"{name}.csv"
