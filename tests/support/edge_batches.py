"""Batches at the limits of every loss: nothing to compare, nothing but ties, cosines of exactly -1 and 1."""

import torch
from torch import Tensor


def edge_batches(width: int, n_classes: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Batches by name: (outputs (B, width) of `dtype`, labels (B, n_classes) 0/1 as float32).

    Outputs are leaves without gradient: call `.requires_grad_()` on a clone. Where n_classes = 1 leaves no
    room for disjoint labels, rows without labels stand in for them. A zero row has the gradient of a division
    by 1e-12, which float16 cannot hold: those batches are left out there.
    """
    generator = torch.Generator().manual_seed(20240607)

    def rows(n: int) -> Tensor:
        return torch.randn(n, width, generator=generator, dtype=torch.float64)

    def several(n: int) -> Tensor:
        labels = (torch.rand(n, n_classes, generator=generator) < 0.4).float()
        labels[torch.arange(n), torch.arange(n) % n_classes] = 1
        return labels

    def one_each(n: int) -> Tensor:
        labels = torch.zeros(n, n_classes)
        labels[torch.arange(n), torch.arange(n) % n_classes] = 1
        return labels

    first = torch.zeros(1, n_classes)
    first[0, 0] = 1
    nothing = torch.zeros(1, n_classes)
    other = nothing.clone()
    if n_classes > 1:
        other[0, -1] = 1

    some_unlabelled = several(7)
    some_unlabelled[[0, 3, 6]] = 0
    disjoint = torch.eye(n_classes)[:6]
    alone = torch.zeros(5, n_classes)
    alone[2, 0] = 1
    base = rows(1)
    poles = torch.cat([base, -base, base, -base, 2 * base])
    twice, twice_labels = rows(3), several(3)
    parallel = torch.cat([base, 3 * base, base / 4, base])
    zero_row = rows(4)
    zero_row[1] = 0

    batches = {
        "several labels": (rows(8), several(8)),
        "one label a row": (rows(8), one_each(8)),
        "one label in all": (rows(5), alone),
        "some rows without labels": (rows(7), some_unlabelled),
        "no row with labels": (rows(4), nothing.repeat(4, 1)),
        "no valid pair": (rows(len(disjoint)), disjoint),
        "identical labels": (rows(6), several(1).repeat(6, 1)),
        "all labels on all rows": (rows(5), torch.ones(5, n_classes)),
        "duplicate rows": (twice.repeat(2, 1), twice_labels.repeat(2, 1)),
        "duplicate rows, other labels": (twice.repeat(2, 1), several(6)),
        "all rows the same": (base.repeat(5, 1), several(5)),
        "one row": (rows(1), first),
        "one row without labels": (rows(1), nothing),
        "two rows, shared label": (rows(2), first.repeat(2, 1)),
        "two rows, disjoint labels": (rows(2), torch.cat([first, other])),
        "cosines of -1 and 1": (poles, several(5)),
        "cosines of -1 and 1, one label": (poles, first.repeat(5, 1)),
        "cosines of 1, no valid pair": (parallel, torch.cat([first, other, nothing, nothing])),
        "long rows": (500 * rows(5), several(5)),
        "short rows": (rows(5) / 500, several(5)),
    }
    if dtype != torch.float16:
        batches["a zero row"] = (zero_row, several(4))
        batches["only zero rows"] = (torch.zeros(3, width), several(3))
    return {name: (outputs.to(dtype), labels) for name, (outputs, labels) in batches.items()}
