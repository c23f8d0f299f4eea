"""One point per label: fixed binary centres (CSQ, OrthoHash) and learned proxies (HyP2, Proxy Anchor)."""

import math
import warnings

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import Tensor, nn

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.hyperparameters import Choice, Number

CENTRES = Choice(
    'kind of centres; "hadamard" needs K to be a power of 2, "auto" uses it if possible, otherwise "balanced"',
    ("auto", "hadamard", "balanced", "bernoulli"),
)
SEED = Number("seed of the random centres", least=0, whole=True)


def new_proxies(n_classes: int, n_bits: int) -> nn.Parameter:
    """Proxies (C, K), one per label, initialised as in HyP2's code (Kaiming normal, fan out)."""
    return nn.Parameter(nn.init.kaiming_normal_(torch.empty(n_classes, n_bits), mode="fan_out"))


def make_centres(kind: str, n_classes: int, n_bits: int, *, seed: int) -> Tensor:
    """Fixed centres (C, K) of -1 and 1, one per label.

    `hadamard` takes the rows of the Hadamard matrix and their negatives, which differ in K / 2 bits or more; it needs K
    to be a power of 2, and beyond 2 K labels it continues with balanced rows. The rows of `balanced` have as many -1
    as 1, the bits of `bernoulli` are independent; of 20 random sets the one whose closest rows are farthest apart is
    kept, and rows that occur in it twice are drawn again. `auto` is `hadamard` where K is a power of 2 and `balanced`
    elsewhere. If K bits have too few such rows, some labels share a centre, and a warning says so.

    Raises:
        BadConfig: `hadamard` for another K.
    """
    generator = torch.Generator().manual_seed(seed)
    power_of_2 = n_bits & (n_bits - 1) == 0
    if kind == "hadamard" and not power_of_2:
        raise BadConfig(
            f"Hadamard centres need n_bits to be a power of 2, got {n_bits}: set centres to 'balanced' or 'auto'"
        )
    if kind == "auto":
        kind = "hadamard" if power_of_2 else "balanced"
    fixed = torch.empty(0, n_bits)
    if kind == "hadamard":
        matrix = torch.from_numpy(hadamard(n_bits, np.float32))
        fixed = torch.cat([matrix, -matrix])[:n_classes]
    draw = _bernoulli if kind == "bernoulli" else _balanced
    best, closest = fixed, math.inf
    for _ in range(20 if n_classes <= 2048 else 1):  # comparing the sets needs C x C numbers
        if len(fixed) == n_classes:
            break
        centres = torch.cat([fixed, draw(n_classes - len(fixed), n_bits, generator)])
        agreement = float((centres @ centres.T).fill_diagonal_(-n_bits).max())
        if agreement < closest:
            best, closest = centres, agreement
    n_unbalanced = int((fixed.sum(dim=1).abs() > 1).sum())
    n_possible = 2**n_bits if kind == "bernoulli" else math.comb(n_bits, n_bits // 2) * (1 + n_bits % 2) + n_unbalanced
    if n_possible < n_classes:
        warnings.warn(
            f"K = {n_bits} has only {n_possible} centres for {n_classes} labels, so some labels share one and "
            "cannot be told apart: use more bits" + (", or centres = 'bernoulli'" if n_classes <= 2**n_bits else ""),
            stacklevel=2,
        )
        return best
    best = _distinct(best)
    while len(best) < n_classes:  # this many rows find most of the codes where nearly all of them are needed
        best = _distinct(torch.cat([best, draw(8 * n_classes, n_bits, generator)]))[:n_classes]
    return best


def _distinct(rows: Tensor) -> Tensor:
    """The rows without those that are equal to an earlier one."""
    _, first = np.unique(rows.numpy(), axis=0, return_index=True)
    return rows[np.sort(first)]


def random_signs(n: int, *, seed: int) -> Tensor:
    """A vector (n,) of -1 and 1, fixed by `seed`."""
    return _bernoulli(1, n, torch.Generator().manual_seed(seed))[0]


def _bernoulli(n: int, n_bits: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (n, n_bits), generator=generator) * 2.0 - 1


def _balanced(n: int, n_bits: int, generator: torch.Generator) -> Tensor:
    order = torch.rand(n, n_bits, generator=generator).argsort(dim=1)
    odd_one = torch.randint(0, 1 + n_bits % 2, (n, 1), generator=generator)  # an odd K cannot be split evenly
    return torch.where(order < n_bits // 2 + odd_one, 1.0, -1.0)
