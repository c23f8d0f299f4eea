"""The contrastive losses once more, slowly: loops straight from the formulas of LOSSES.md, in float64.

Also the checks that every one of them must pass. Nothing here is shared with the fast forms.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.edge_batches import edge_batches

Memory = tuple[Tensor, Tensor]
Row = tuple[Tensor, frozenset[int]]

# Edge batches in which no two rows share a label.
NO_PAIR = (
    "one label in all",
    "no row with labels",
    "no valid pair",
    "one row",
    "one row without labels",
    "two rows, disjoint labels",
    "cosines of 1, no valid pair",
)
UNLABELLED = ("no row with labels", "one row without labels")


def batch(seed: int, n: int = 7, width: int = 5, n_classes: int = 4, density: float = 0.4) -> Memory:
    """Random float64 outputs and labels; with seed % 3 == 1 one row has no label, with 2 one class is empty."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(n, width, generator=generator, dtype=torch.float64)
    labels = (torch.rand(n, n_classes, generator=generator) < density).double()
    if seed % 3 == 1:
        labels[n // 2] = 0
    if seed % 3 == 2:
        labels[:, -1] = 0
    return outputs, labels


def cos(a: Tensor, b: Tensor) -> Tensor:
    return a @ b / (a.norm().clamp_min(1e-12) * b.norm().clamp_min(1e-12))


def label_sets(labels: Tensor) -> list[frozenset[int]]:
    return [frozenset(j for j, value in enumerate(row) if value) for row in labels.tolist()]


def rows_of(outputs: Tensor, labels: Tensor) -> list[Row]:
    return list(zip(outputs.unbind(), label_sets(labels), strict=True))


def anchors(outputs: Tensor, labels: Tensor, memory: Memory | None) -> Iterator[tuple[Row, list[Row]]]:
    """Every row with its contrast set: all others of the batch, or exactly the memory."""
    rows = rows_of(outputs, labels)
    for i, row in enumerate(rows):
        yield row, (rows[:i] + rows[i + 1 :] if memory is None else rows_of(*memory))


def log_probabilities(anchor: Tensor, others: list[Row], tau: float) -> list[Tensor]:
    if not others:
        return []
    scores = torch.stack([cos(anchor, z) / tau for z, _ in others])
    return list(scores - torch.logsumexp(scores, 0))


def jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    return len(a & b) / len(a | b) if a | b else 0.0


def reduced(values: list[Tensor | None], reduction: str, like: Tensor) -> Tensor:
    """`None` stands for an anchor that is not valid."""
    valid = [v for v in values if v is not None]
    total = sum(valid, start=like.sum() * 0)
    return total / {"valid": max(len(valid), 1), "batch": max(len(values), 1), "sum": 1}[reduction]


def is_positive(a: frozenset[int], b: frozenset[int], positives: str, empty_match: bool = False) -> bool:
    if positives == "any":
        return bool(a & b)
    return a == b and (empty_match or bool(a))


def supcon(
    outputs: Tensor,
    labels: Tensor,
    memory: Memory | None = None,
    *,
    positives: str = "any",
    tau: float = 0.1,
    reduction: str = "valid",
    base_temperature: float | None = None,
    empty_match: bool = False,
) -> Tensor:
    values: list[Tensor | None] = []
    for (z, own), others in anchors(outputs, labels, memory):
        log_p = log_probabilities(z, others, tau)
        chosen = [lp for lp, (_, s) in zip(log_p, others, strict=True) if is_positive(own, s, positives, empty_match)]
        values.append(-sum(chosen) / len(chosen) if chosen else None)
    return reduced(values, reduction, outputs) * (tau / base_temperature if base_temperature else 1)


def mulsupcon(
    outputs: Tensor,
    labels: Tensor,
    memory: Memory | None = None,
    *,
    tau: float = 0.1,
    reduction: str = "labels",
) -> Tensor:
    total = outputs.sum() * 0
    n_valid = 0
    for (z, own), others in anchors(outputs, labels, memory):
        log_p = log_probabilities(z, others, tau)
        some = False
        for j in own:
            chosen = [lp for lp, (_, s) in zip(log_p, others, strict=True) if j in s]
            if chosen:
                some = True
                total = total - sum(chosen) / len(chosen) / (len(own) if reduction == "sample" else 1)
        n_valid += some
    b = max(len(outputs), 1)
    n_labels = max(sum(len(s) for s in label_sets(labels)), 1)
    return total / {"labels": n_labels, "sample": b, "batch": b, "valid": max(n_valid, 1), "sum": 1}[reduction]


def l_base(
    outputs: Tensor, labels: Tensor, memory: Memory | None = None, *, tau: float = 0.1, reduction: str = "valid"
) -> Tensor:
    values: list[Tensor | None] = []
    for (z, own), others in anchors(outputs, labels, memory):
        log_p = log_probabilities(z, others, tau)
        weights = [jaccard(own, s) for _, s in others]
        if sum(weights) == 0:
            values.append(None)
        else:
            values.append(-sum(w * lp for w, lp in zip(weights, log_p, strict=True)) / sum(weights))
    return reduced(values, reduction, outputs)


def l_proto(
    outputs: Tensor, labels: Tensor, prototypes: Tensor, *, tau: float = 0.1, reduction: str = "valid"
) -> Tensor:
    values: list[Tensor | None] = []
    for z, own in rows_of(outputs, labels):
        scores = torch.stack([cos(z, p) / tau for p in prototypes])
        log_q = scores - torch.logsumexp(scores, 0)
        values.append(-sum(log_q[j] for j in own) / len(own) if own else None)
    return reduced(values, reduction, outputs)


def msc(
    outputs: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    memory: Memory | None = None,
    *,
    tau: float = 0.1,
    beta: float = 0.1,
    reduction: str = "valid",
) -> Tensor:
    values: list[Tensor | None] = []
    queue = [] if memory is None else rows_of(*memory)
    for (z, own), others in anchors(outputs, labels, None):
        if not own:
            values.append(None)
            continue
        instances = others + queue
        s = [cos(z, other) / tau for other, _ in instances]
        t = [cos(z, p) / tau for p in prototypes]
        parts = t + ([x + math.log(beta) for x in s] if beta else [])
        log_den = torch.logsumexp(torch.stack(parts), 0)
        loss = outputs.sum() * 0
        for j in own:
            inner, n = t[j] - log_den, 1.0
            for (_, labels_k), s_k in zip(instances, s, strict=True):
                if j in labels_k:
                    f = 1 / len(own | labels_k)
                    n += f
                    inner = inner + f * (s_k - log_den)
            loss = loss - inner / n
        values.append(loss / len(own))
    return reduced(values, reduction, outputs)


def with_penalty(log_p: list[Tensor], scores: list[Tensor], weights: list[float]) -> Tensor:
    """- sum of weight * log p - sum over positives of max(0, sigma - weight) * score."""
    total = torch.zeros((), dtype=torch.float64)
    for lp, s, w in zip(log_p, scores, weights, strict=True):
        total = total - w * lp
        if w > 0:
            total = total - max(0.0, math.exp(lp.item()) - w) * s
    return total


def reg(
    outputs: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    memory: Memory | None = None,
    *,
    tau: float = 0.1,
    alpha: float = 0.0,
    penalty: bool = True,
    proto_anchors: bool = True,
    reduction: str = "valid",
) -> Tensor:
    rows = rows_of(outputs, labels)
    labels_as_rows = [(p, frozenset([j])) for j, p in enumerate(prototypes)]
    in_batch = frozenset().union(*(own for _, own in rows)) if rows else frozenset()
    values: list[Tensor | None] = []
    for i, (z, own) in enumerate(rows + (labels_as_rows if proto_anchors else [])):
        if memory is None:
            instances = [row for k, row in enumerate(rows) if k != i]
        else:
            instances = rows_of(*memory)
        others = instances + [row for j, row in enumerate(labels_as_rows) if i != len(rows) + j]

        def f(s: frozenset[int], own: frozenset[int] = own) -> float:
            if not own & s:
                return 0.0
            return float(s <= own) if alpha < 0 else float((len(own & s) / len(s)) ** alpha)

        weights = [0.0] * len(others)
        for j in own:
            n = sum(f(s) for _, s in others if j in s)
            for k, (_, s) in enumerate(others):
                if n > 0 and j in s:
                    weights[k] += f(s) / n / len(own)
        log_p = log_probabilities(z, others, tau)
        if not own & in_batch:  # a row without a label, or a prototype whose label no row has
            values.append(None)
        elif penalty:
            values.append(with_penalty(log_p, [cos(z, o) / tau for o, _ in others], weights))
        else:
            values.append(-sum(w * lp for w, lp in zip(weights, log_p, strict=True)))
    return reduced(values, reduction, outputs)


def algorithm2(outputs: Tensor, labels: Tensor, *, tau: float = 0.1) -> Tensor:
    total = outputs.sum() * 0
    for (z, own), others in anchors(outputs, labels, None):
        log_p = log_probabilities(z, others, tau)
        for lp, (other, s) in zip(log_p, others, strict=True):
            lam = sum(1 / sum(j in s2 for _, s2 in others) for j in own & s)
            total = total - lam * lp
            if lam > 0:
                total = total - max(0.0, math.exp(lp.item()) - lam / len(own)) * cos(z, other) / tau
    return total / len(outputs)


def supcon_reg(
    outputs: Tensor,
    labels: Tensor,
    memory: Memory | None = None,
    *,
    positives: str = "any",
    tau: float = 0.1,
    reduction: str = "valid",
) -> Tensor:
    values: list[Tensor | None] = []
    for (z, own), others in anchors(outputs, labels, memory):
        chosen = [is_positive(own, s, positives) for _, s in others]
        if not any(chosen):
            values.append(None)
            continue
        weights = [c / sum(chosen) for c in chosen]
        log_p = log_probabilities(z, others, tau)
        values.append(with_penalty(log_p, [cos(z, o) / tau for o, _ in others], weights))
    return reduced(values, reduction, outputs)


def factor(own: frozenset[int], other: frozenset[int]) -> float:
    return len(own & other) / len(own) / (1 + len(other - own))


def simdis(
    outputs: Tensor,
    labels: Tensor,
    memory: Memory | None = None,
    *,
    mode: str = "inside",
    tau: float = 0.07,
    reduction: str = "valid",
) -> Tensor:
    values: list[Tensor | None] = []
    for (z, own), others in anchors(outputs, labels, memory):
        log_p = log_probabilities(z, others, tau)
        pairs = [(factor(own, s), lp) for lp, (_, s) in zip(log_p, others, strict=True) if own & s]
        if not pairs:
            values.append(None)
        elif mode == "inside":
            values.append(-sum(math.log(k) + lp for k, lp in pairs) / len(pairs))
        else:
            by = len(pairs) if mode == "outside" else sum(k for k, _ in pairs)
            values.append(-sum(k * lp for k, lp in pairs) / by)
    return reduced(values, reduction, outputs)


def hbl_margins(
    outputs: Tensor,
    labels: Tensor,
    memory: Memory | None = None,
    *,
    gamma: float = 0.8,
    m_rel: float = 0.1,
    m_abs: float = 0.2,
    k_min: int = 64,
    gate: str = "positives",
    median_kind: str = "mean",
) -> Tensor:
    """Mean over all anchors of HBL_i, without lambda."""
    total = outputs.sum() * 0
    for (z, own), others in anchors(outputs, labels, memory):
        c = [cos(z, o) for o, _ in others]
        j = [jaccard(own, s) for _, s in others]
        inside = [k for k, (_, s) in enumerate(others) if own & s]
        outside = [k for k, (_, s) in enumerate(others) if not own & s]
        if not inside:
            continue
        theta = (median if median_kind == "mean" else median_low)([j[k] for k in inside])
        soft = [c[k] for k in inside if j[k] >= theta - 1e-6]
        hard = [c[k] for k in inside if j[k] < theta - 1e-6]
        if len(inside if gate == "positives" else soft) < k_min or not soft or not hard:
            continue
        rel = max(hard) - min(soft) + m_rel
        total = total + (rel if rel > 0 else 0)
        if outside:
            absolute = max(c[k] for k in outside) - min(hard) + m_abs
            total = total + gamma * (absolute if absolute > 0 else 0)
    return total / max(len(outputs), 1)


def total(terms: dict[str, Tensor]) -> Tensor:
    assert terms
    for name, term in terms.items():
        assert term.ndim == 0, name
    return sum(terms.values(), start=torch.zeros((), dtype=next(iter(terms.values())).dtype))


def value_and_gradients(
    function: Callable[[Tensor], Tensor], outputs: Tensor, *parameters: Tensor
) -> tuple[Tensor, ...]:
    leaf = outputs.detach().clone().requires_grad_()
    value = function(leaf)
    return (value.detach(), *torch.autograd.grad(value, [leaf, *parameters]))


def assert_same(
    loss: nn.Module,
    literal: Callable[..., Tensor],
    outputs: Tensor,
    labels: Tensor,
    memory: Memory | None = None,
    tolerance: float = 1e-10,
) -> None:
    """The loss and `literal(outputs, *parameters)` agree in value and in every gradient."""
    loss = loss.double()
    parameters = list(loss.parameters())
    fast = value_and_gradients(lambda z: total(loss(z, labels, memory=memory)), outputs, *parameters)
    slow = value_and_gradients(lambda z: literal(z, *parameters), outputs, *parameters)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def gradients_of(loss: nn.Module, outputs: Tensor, labels: Tensor, **context: Any) -> tuple[Tensor, list[Tensor]]:
    """Value and gradients of outputs and parameters; everything must be attached to the graph."""
    leaf = outputs.detach().clone().requires_grad_()
    terms = loss(leaf, labels, **context)
    for name, term in terms.items():
        assert term.requires_grad, f"{name} is not attached to the graph"
    value = total(terms)
    return value.detach(), list(torch.autograd.grad(value, [leaf, *loss.parameters()]))


def assert_survives_edges(
    build: Callable[..., nn.Module], *, zero: tuple[str, ...], zero_with_memory: tuple[str, ...] = UNLABELLED
) -> None:
    """Finite value and gradients, attached, on every edge batch; exactly 0 where nothing can be compared."""
    for n_classes, dtype in itertools.product((1, 3, 8), (torch.float64, torch.float32, torch.bfloat16, torch.float16)):
        for tau in (0.1, 0.001) if dtype in (torch.float32, torch.float64) else (0.1,):
            loss = build(n_classes=n_classes, n_bits=6, tau=tau)
            batches = edge_batches(6, n_classes, dtype)
            for name, (outputs, labels) in batches.items():
                kept, kept_labels = outputs.clone(), labels.clone()
                memories: list[Any] = [None, (outputs, labels), (outputs[:0], labels[:0])]
                for which, memory in enumerate(memories):
                    where = f"{name}, C={n_classes}, {dtype}, tau={tau}, memory {which}"
                    value, gradients = gradients_of(loss, outputs, labels, memory=memory)
                    assert bool(value.isfinite()), where
                    assert all(bool(g.isfinite().all()) for g in gradients), where
                    nothing = name in (zero if which == 0 else zero_with_memory)
                    if nothing or (which == 2 and zero == NO_PAIR):
                        assert value == 0, where
                        assert all(not g.any() for g in gradients), where
                assert torch.equal(outputs, kept), f"{name}: outputs were changed"
                assert torch.equal(labels, kept_labels), f"{name}: labels were changed"
    loss = build(n_classes=3, n_bits=6, tau=0.1)
    value, gradients = gradients_of(loss, torch.zeros(0, 6), torch.zeros(0, 3))
    assert value == 0
    assert all(bool(g.isfinite().all()) for g in gradients)


def assert_low_precision_agrees(build: Callable[..., nn.Module], seeds: range = range(6)) -> None:
    """float32 stays within 2e-4 of float64, and half precision under autocast is computed in float32."""
    for seed in seeds:
        outputs, labels = batch(seed, n=12, width=6, n_classes=4)
        memory = batch(seed + 100, n=30, width=6, n_classes=4)
        for context in (None, memory):
            torch.manual_seed(seed)
            loss = build(n_classes=4, n_bits=6)
            exact = gradients_of(loss.double(), outputs, labels, memory=context)
            rough = gradients_of(loss.float(), outputs.float(), labels, memory=context)
            torch.testing.assert_close(rough[0].double(), exact[0], rtol=2e-4, atol=2e-4)
            for a, b in zip(rough[1], exact[1], strict=True):
                torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-4)
            half = outputs.bfloat16()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inside = loss(half, labels, memory=context)
            outside = loss(half.float(), labels, memory=context)
            for name, term in inside.items():
                assert term.dtype == torch.float32
                assert torch.equal(term, outside[name]), name


def assert_invariant(build: Callable[..., nn.Module], seeds: range = range(4)) -> None:
    """The order of rows, of memory rows and of labels and the length of rows do not matter."""
    for seed in seeds:
        outputs, labels = batch(seed, n=9)
        ref, ref_y = batch(seed + 50, n=15)
        shuffle, mix, columns = torch.randperm(9), torch.randperm(15), torch.randperm(4)
        loss = build(n_classes=4, n_bits=5).double()
        other = build(n_classes=4, n_bits=5).double()
        other.load_state_dict({k: v[columns] if v.ndim else v for k, v in loss.state_dict().items()})
        scale = torch.rand(9, 1, dtype=torch.float64) + 0.5
        for memory, mixed, recoloured in (
            (None, None, None),
            ((ref, ref_y), (3 * ref[mix], ref_y[mix]), (ref, ref_y[:, columns])),
        ):
            value, (gradient, *_) = gradients_of(loss, outputs, labels, memory=memory)
            again, (moved, *_) = gradients_of(loss, outputs[shuffle], labels[shuffle], memory=mixed)
            torch.testing.assert_close(again, value)
            torch.testing.assert_close(moved, gradient[shuffle])
            again, (same, *_) = gradients_of(other, outputs, labels[:, columns], memory=recoloured)
            torch.testing.assert_close(again, value)
            torch.testing.assert_close(same, gradient)
            again, (scaled, *_) = gradients_of(loss, outputs * scale, labels, memory=memory)
            torch.testing.assert_close(again, value)
            torch.testing.assert_close(scaled * scale, gradient)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def assert_no_tensor_over_labels(build: Callable[..., nn.Module]) -> None:
    """Nothing of the size anchors x contrast rows x labels is ever made."""
    n, q, n_classes = 12, 40, 20
    outputs, labels = batch(0, n=n, width=6, n_classes=n_classes, density=0.2)
    memory = batch(1, n=q, width=6, n_classes=n_classes, density=0.2)
    loss = build(n_classes=n_classes, n_bits=6).double()
    with LargestTensor() as seen:
        gradients_of(loss, outputs, labels, memory=memory)
    assert seen.numel <= (n + n_classes) * (n + q + n_classes)
