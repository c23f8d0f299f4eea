"""Every loss but CLML and Bi-half once more, slowly: loops straight from the published formulas, in float64.

`LITERALS` has them by name and `CASES` lists names with options; they share nothing with the fast forms. Also random
batches, and a loss's value with its gradients.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, permutations, product
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor, nn

from hashseek.training.losses import loss_class

Memory = tuple[Tensor, Tensor]
Row = tuple[Tensor, frozenset[int]]


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


def features_for(name: str, n: int) -> dict[str, Any]:
    """Features for n outputs, if the loss `name` reads some."""
    return {"features": batch(2, n=n, width=11)[0]} if loss_class(name).reads_features else {}


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


def algorithm2(outputs: Tensor, labels: Tensor, memory: Memory | None = None, *, tau: float = 0.1) -> Tensor:
    total = outputs.sum() * 0
    for (z, own), others in anchors(outputs, labels, memory):
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


def dsh(outputs, labels, memory=None, *, m=None, alpha=None, dense=False):
    m = 2 * outputs.shape[1] if m is None else m
    rows = rows_of(outputs, labels)
    if memory is not None:
        pairs = list(product(rows, rows_of(*memory)))
    else:
        pairs = list(product(rows, rows) if dense else combinations(rows, 2))
    value = 0
    for (a, own), (b, other) in pairs:
        d = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
        value = value + (d if own & other else (m - d if m > d else 0 * d)) / 2 / len(pairs)
    away = sum(abs(abs(x) - 1) for row in outputs for x in row) / len(outputs)
    if dense:
        return value + (0.1 if alpha is None else alpha) * away / outputs.shape[1]
    return value + (0.01 if alpha is None else alpha) * away


def dpsh(outputs, labels, memory=None, *, eta=0.1):
    rows = rows_of(outputs, labels)
    pairs = list(product(rows, rows if memory is None else rows_of(*memory)))
    value = 0
    for (a, own), (b, other) in pairs:
        half = a @ b / 2
        value = value + (torch.log1p(torch.exp(half)) - (half if own & other else 0)) / len(pairs)
    away = sum((u - (1 if u > 0 else -1)) ** 2 for row in outputs for u in row)
    return value + eta * away / outputs.numel()


def dhn(
    outputs,
    labels,
    memory=None,
    *,
    lam=0.1,
    inner=0.5,
    quantizer="logcosh",
    normed=False,
    clip=math.inf,
    balance=False,
):
    rows = rows_of(outputs, labels)
    pairs = list(product(rows, rows if memory is None else rows_of(*memory)))
    n_similar = sum(bool(own & other) for (_, own), (_, other) in pairs)
    value = 0
    for (a, own), (b, other) in pairs:
        theta = cos(a, b) if normed else a @ b
        theta = inner * (theta if -clip < theta < clip else torch.sign(theta.detach()) * clip)
        nll = torch.log1p(torch.exp(theta)) - (theta if own & other else 0)
        value = value + nll * (len(pairs) / n_similar if balance and own & other else 1) / len(pairs)
    away = {
        "logcosh": lambda u: torch.log(torch.cosh(abs(u) - 1)),
        "square": lambda u: (abs(u) - 1) ** 2,
        "l1": lambda u: abs(abs(u) - 1),
    }[quantizer]
    return value + lam * sum(away(u) for row in outputs for u in row) / outputs.numel()


def idhn(outputs, labels, memory=None, *, gamma=0.1, alpha=0.1):
    soft = lambda u: u / (1 + abs(u))  # noqa: E731
    rows = rows_of(soft(outputs), labels)
    pairs = list(product(rows, rows if memory is None else rows_of(soft(memory[0]), memory[1])))
    n_bits = outputs.shape[1]
    value = 0
    for (a, own), (b, other) in pairs:
        theta = a @ b
        s = len(own & other) / math.sqrt(len(own) * len(other)) if own and other else 0.0
        if s > 0.99 or s < 0.01:
            t = 5 * theta / n_bits
            value = value + torch.log1p(torch.exp(t)) - s * t
        else:
            value = value + gamma * n_bits * ((theta + n_bits) / (2 * n_bits) - s) ** 2
    away = sum(abs(abs(h) - 1) for row, _ in rows for h in row) / outputs.numel()
    return value / len(pairs) + alpha * away


def hashnet(outputs, labels, memory=None, *, a, jaccard_weights=False, class_num=None, scale=1.0):
    rows = rows_of(outputs, labels)
    similar, apart = [], []
    for (u, own), (v, other) in product(rows, rows if memory is None else rows_of(*memory)):
        theta = a * (torch.tanh(scale * u) @ torch.tanh(scale * v))
        soft = torch.log1p(torch.exp(theta))
        if own & other:
            similar.append((soft - theta) * (jaccard(own, other) if jaccard_weights else 1))
        else:
            apart.append(soft)
    if class_num is None:
        return sum(sum(pairs) / len(pairs) for pairs in (similar, apart) if pairs)
    return (class_num * sum(similar) + sum(apart)) / (class_num * len(similar) + len(apart))


def csq(outputs, labels, centres, tie, *, lam=1e-4):
    cross, away, n = 0, 0, 0
    for row, own in zip(outputs, label_sets(labels), strict=True):
        if not own:
            continue
        for k, u in enumerate(row):
            votes = sum(centres[j][k] for j in own)
            t = tie[k] if votes == 0 else math.copysign(1, votes)
            q = torch.sigmoid(2 * u)
            cross = cross - (torch.log(q) if t > 0 else torch.log(1 - q))
            away = away + (abs(torch.tanh(u)) - 1) ** 2
            n += 1
    return (cross + lam * away) / n if n else 0 * outputs.sum()


def orthohash(outputs, labels, centres, *, s=8.0, m=0.2, margin="cosine", bce=False):
    values = []
    for u, own in zip(outputs, label_sets(labels), strict=True):
        if not own:
            continue
        scores = []
        for c, centre in enumerate(centres):
            cosine = cos(u, centre)
            if c in own:
                cosine = cosine - m if margin == "cosine" else torch.cos(torch.acos(cosine) + m)
            scores.append(s * cosine)
        if bce:
            for c, x in enumerate(scores):
                values.append(torch.log1p(torch.exp(-x if c in own else x)))
        else:
            everything = torch.log(sum(torch.exp(x) for x in scores))
            values.append(sum(everything - scores[c] for c in own) / len(own))
    return sum(values) / len(values) if values else 0 * outputs.sum()


def proxy_anchor(outputs, proxies, labels, *, alpha=32.0, delta=0.1):
    sets = label_sets(labels)
    positive, negative = [], []
    for j, proxy in enumerate(proxies):
        cosines = [cos(u, proxy) for u in outputs]
        near = [torch.exp(-alpha * (c - delta)) for c, own in zip(cosines, sets, strict=True) if j in own]
        far = [torch.exp(alpha * (c + delta)) for c, own in zip(cosines, sets, strict=True) if j not in own]
        if near:
            positive.append(torch.log(1 + sum(near)))
        negative.append(torch.log(1 + sum(far)) if far else 0)
    return (sum(positive) / len(positive) if positive else 0) + sum(negative) / len(proxies)


def hyp2(outputs, proxies, labels, *, zeta, beta=0.5, offset=1.0, parts="proxy+irrelevant"):
    sets = label_sets(labels)
    rows = range(len(outputs))
    result = 0 * outputs.sum()
    if "proxy" in parts:
        near, far = [], []
        for i, j in product(rows, range(len(proxies))):
            c = cos(outputs[i], proxies[j])
            if j in sets[i]:
                near.append(offset - c)
            else:
                far.append(c - zeta if c > zeta else 0 * c)
        result = result + mean_or_0(near, outputs) + mean_or_0(far, outputs)
    if "irrelevant" in parts:
        far = []
        for i, k in product(rows, rows):
            if len(sets[i]) > 1 and len(sets[k]) > 1 and not sets[i] & sets[k]:
                c = cos(outputs[i], outputs[k])
                far.append(c - zeta if c > zeta else 0 * c)
        result = result + beta * mean_or_0(far, outputs)
    if "pair" in parts:
        near, far = [], []
        for i, k in permutations(rows, 2):
            c = cos(outputs[i], outputs[k])
            if sets[i] & sets[k]:
                near.append(offset - c)
            else:
                far.append(c - zeta if c > zeta else 0 * c)
        weight = 1 if parts == "pair" else beta
        result = result + weight * (mean_or_0(near, outputs) + mean_or_0(far, outputs))
    return result


def tie_aware(outputs, labels, *, a, weight=1.0):
    """Both terms by loops over rows, other rows and distances."""
    rows = [(torch.tanh(u), own) for u, own in rows_of(outputs, labels)]
    width = outputs.shape[1]
    pairs, precisions = [], []
    for i, (h, own) in enumerate(rows):
        found = [outputs.new_zeros(()) for _ in range(width + 2)]
        relevant = [outputs.new_zeros(()) for _ in range(width + 2)]
        n_similar = 0
        for j, (g, other) in enumerate(rows):
            if i == j:
                continue
            theta = h @ g
            similar = bool(own & other)
            n_similar += similar
            pairs.append(torch.log1p(torch.exp(a * theta)) - a * theta * similar)
            distance = (width - theta) / 2
            low = math.floor(distance.item())
            for d, share in ((low, low + 1 - distance), (low + 1, distance - low)):
                found[d] = found[d] + share
                relevant[d] = relevant[d] + share * similar
        if n_similar:
            total = outputs.new_zeros(())
            for d in range(width + 2):
                nearer, nearer_relevant = sum(found[:d]), sum(relevant[:d])
                total = total + relevant[d] * (nearer_relevant + (relevant[d] + 1) / 2) / (nearer + (found[d] + 1) / 2)
            precisions.append(total / n_similar)
    zero = outputs.sum() * 0
    ap = weight * (1 - sum(precisions) / len(precisions)) if precisions else zero
    return (sum(pairs) / len(pairs) if pairs else zero) + ap


def mean_or_0(values, like):
    return sum(values) / len(values) if values else 0 * like.sum()


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def weight(value, detach):
    return value.detach() if detach else value


def bce(x, y):
    return -torch.log(sigmoid(x)) if y else -torch.log(1 - sigmoid(x))


def focal(x, y, gamma=2.0, detach_weight=False):
    q = sigmoid(x)
    if y:
        return -weight((1 - q) ** gamma, detach_weight) * torch.log(q)
    return -weight(q**gamma, detach_weight) * torch.log(1 - q)


def asl(x, y, gamma_pos=1.0, gamma_neg=4.0, m=0.05, detach_weight=False):
    q = sigmoid(x)
    if y:
        return -weight((1 - q) ** gamma_pos, detach_weight) * torch.log(q)
    if q <= m:
        return 0 * q
    return -weight((q - m) ** gamma_neg, detach_weight) * torch.log(1 - (q - m))


def hill(x, y, lam=1.5, margin=1.0, gamma=2.0):
    if y:
        q = sigmoid(x - margin)
        return -((1 - q) ** gamma) * torch.log(q)
    q = sigmoid(x)
    return (lam - q) * q**2


def splc(x, y, epoch=0, tau=0.6, margin=1.0, gamma=2.0, start_epoch=1, margin_on_corrected=False):
    if y:
        return focal(x - margin, True, gamma)
    if epoch >= start_epoch and sigmoid(x) > tau:
        return focal(x - margin if margin_on_corrected else x, True, gamma)
    return focal(x, False, gamma)


def zlpr(row, own):
    near = sum(torch.exp(-x) for x, y in zip(row, own, strict=True) if y)
    far = sum(torch.exp(x) for x, y in zip(row, own, strict=True) if not y)
    return math.log(1) + torch.log(1 + near + 0 * row.sum()) + torch.log(1 + far + 0 * row.sum())


def hbl(
    outputs,
    labels,
    memory=None,
    *,
    tau=0.1,
    lam=0.01,
    base="any",
    reduction="batch",
    median="mean",
    k_min=64,
    **options,
):
    form = supcon if base == "any" else mulsupcon
    margins = hbl_margins(outputs, labels, memory, median_kind=median, k_min=k_min, **options)
    return form(outputs, labels, memory, tau=tau, reduction=reduction) + lam * margins


def by_cell(cell, x, labels, reduction="mean", **options):
    values = [cell(x[i, c], bool(labels[i, c]), **options) for i, c in product(range(len(x)), range(x.shape[1]))]
    return sum(values) / (len(values) if reduction == "mean" else 1)


def by_row(row, x, labels, reduction="mean"):
    values = [row(logits, own) for logits, own in zip(x, labels.tolist(), strict=True)]
    return sum(values) / (len(values) if reduction == "mean" else 1)


def of_rows(form, loss, z, y, memory, epoch, **options):
    """A form that needs neither parameters nor the epoch."""
    return form(z, y, memory, **options)


def of_prototypes(form, loss, z, y, memory, epoch, **options):
    return form(z, y, loss.prototypes, memory, **options)


def of_proxies(loss, z, y, memory, epoch, **options):
    return hyp2(z, loss.proxies if loss.proxies is not None else (), y, **{"zeta": loss.zeta, **options})


def of_centres(form, loss, z, y, memory, epoch, **options):
    held = {"tie": loss.tie.tolist()} if form is csq else {}
    options = {key: value for key, value in options.items() if key not in ("centres", "seed")}
    return form(z, y, centres=loss.centres.double(), **held, **options)


def of_logits(form, cell, loss, z, y, memory, epoch, **options):
    return form(partial(cell, epoch=epoch) if cell is splc else cell, z, y, **options)


def of_reg(loss, z, y, memory, epoch, *, reg_algorithm2=False, **options):
    if reg_algorithm2:
        return algorithm2(z, y, memory, **options)
    return reg(z, y, loss.prototypes, memory, **options)


def of_hashnet(loss, z, y, memory, epoch, *, jaccard=False, continuation="epoch", **options):
    scale = math.sqrt(epoch // 20 + 1) if continuation == "epoch" else 1.0
    return hashnet(z, y, memory, jaccard_weights=jaccard, scale=scale, **{"a": 10 / z.shape[1], **options})


LITERALS: dict[str, Callable[..., Tensor]] = {
    **{
        name: partial(of_rows, form)
        for name, form in {
            "dsh": dsh,
            "dpsh": dpsh,
            "dhn": dhn,
            "idhn": idhn,
            "supcon": supcon,
            "supcon_all": partial(supcon, positives="all"),
            "mulsupcon": mulsupcon,
            "l_base": l_base,
            "supcon_reg": supcon_reg,
            "simdis": simdis,
            "hbl": hbl,
        }.items()
    },
    "msc": partial(of_prototypes, msc),
    "reg": of_reg,
    "wo_reg": partial(of_reg, penalty=False),
    "l_proto": lambda loss, z, y, memory, epoch, **options: l_proto(z, y, loss.prototypes, **options),
    "hyp2": of_proxies,
    "hyp2_proxy": partial(of_proxies, parts="proxy"),
    "hyp2_pair": partial(of_proxies, parts="pair"),
    "hyp2_proxy_pair": partial(of_proxies, parts="proxy+pair"),
    "proxy_anchor": lambda loss, z, y, memory, epoch, **options: proxy_anchor(z, loss.proxies, y, **options),
    "tie_aware": lambda loss, z, y, memory, epoch, **options: tie_aware(z, y, **{"a": 4.8 / z.shape[1], **options}),
    "hashnet": of_hashnet,
    "csq": partial(of_centres, csq),
    "orthohash": partial(of_centres, orthohash),
    "zlpr": partial(of_logits, by_row, zlpr),
    **{cell.__name__: partial(of_logits, by_cell, cell) for cell in (bce, focal, asl, hill, splc)},
}
"""(loss, outputs, labels, memory, epoch, **options) -> value, with the parameters and buffers of the loss."""

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in LITERALS),
    ("asl", {"gamma_pos": 0, "gamma_neg": 1, "m": 0, "reduction": "sum"}),
    ("asl", {"gamma_pos": 0.5, "gamma_neg": 0.5, "m": 0.4}),
    ("asl", {"gamma_neg": 0, "m": 0.3, "detach_weight": True}),
    ("asl", {"m": 1}),
    ("bce", {"reduction": "sum"}),
    ("csq", {"lam": 0.05, "seed": 3, "centres": "bernoulli"}),
    ("csq", {"centres": "balanced", "lam": 0}),
    ("dhn", {"inner": 1.0, "lam": 0.7, "quantizer": "square"}),
    ("dhn", {"normed": True, "balance": True}),
    ("dhn", {"clip": 0.8, "balance": True, "quantizer": "l1", "lam": 0}),
    ("dpsh", {"eta": 2.0}),
    ("dsh", {"m": 3.0, "alpha": 0.5}),
    ("dsh", {"dense": True}),
    ("focal", {"gamma": 0.5, "reduction": "sum"}),
    ("focal", {"gamma": 0}),
    ("focal", {"detach_weight": True}),
    ("hashnet", {"a": 0.1, "continuation": "none"}),
    ("hashnet", {"class_num": 4.5}),
    ("hashnet", {"jaccard": True}),
    ("hashnet", {"jaccard": True, "class_num": 0.3, "a": 3}),
    ("hbl", {"k_min": 1, "lam": 1.0}),
    ("hbl", {"k_min": 1, "base": "mulsupcon", "reduction": "labels", "lam": 1.0}),
    ("hbl", {"k_min": 1, "base": "mulsupcon", "reduction": "sample"}),
    ("hbl", {"k_min": 1, "reduction": "valid", "gamma": 2.0, "m_rel": 0.5, "m_abs": 1.0}),
    ("hbl", {"k_min": 1, "reduction": "sum", "m_rel": 0, "m_abs": 0}),
    ("hbl", {"gate": "soft", "k_min": 3, "lam": 1.0}),
    ("hbl", {"median": "lower", "lam": 1.0, "k_min": 2}),
    ("hbl", {"median": "lower", "gate": "soft", "k_min": 4}),
    ("hbl", {"k_min": 6, "tau": 0.01, "lam": 1.0}),
    ("hill", {"lam": 1.2, "margin": 0.5, "gamma": 1}),
    ("hyp2", {"beta": 1.0, "zeta": -0.2, "offset": 0.0}),
    ("hyp2", {"beta": 0}),
    ("hyp2_pair", {"zeta": -0.1, "offset": 0.0}),
    ("hyp2_proxy_pair", {"beta": 0.7, "zeta": 0.1}),
    ("idhn", {"gamma": 2.0, "alpha": 0}),
    ("idhn", {"gamma": 0, "alpha": 1.5}),
    ("l_base", {"tau": 0.5, "reduction": "batch"}),
    ("l_base", {"reduction": "sum"}),
    ("l_proto", {"tau": 0.5, "reduction": "batch"}),
    ("l_proto", {"reduction": "sum"}),
    ("msc", {"beta": 0}),
    ("msc", {"beta": 3, "tau": 0.5, "reduction": "batch"}),
    ("msc", {"reduction": "sum"}),
    *(("mulsupcon", {"reduction": how}) for how in ("sample", "batch", "valid")),
    ("mulsupcon", {"reduction": "sum", "tau": 0.01}),
    ("orthohash", {"s": 3.0, "m": 0.5}),
    ("orthohash", {"margin": "arc"}),
    ("orthohash", {"bce": True}),
    ("orthohash", {"bce": True, "margin": "arc", "m": 0.4}),
    ("orthohash", {"m": 0, "centres": "balanced", "seed": 2}),
    ("proxy_anchor", {"alpha": 4.0, "delta": 0.3}),
    ("proxy_anchor", {"alpha": 8, "delta": -0.1}),
    ("reg", {"alpha": 1.0}),
    ("reg", {"alpha": 0.5, "tau": 0.3}),
    ("reg", {"alpha": -1.0}),
    ("reg", {"proto_anchors": False, "reduction": "sum"}),
    ("reg", {"reduction": "batch"}),
    ("reg", {"reg_algorithm2": True, "tau": 0.3}),
    ("simdis", {"mode": "inside", "reduction": "sum", "tau": 0.3}),
    ("simdis", {"mode": "outside"}),
    ("simdis", {"mode": "outside", "reduction": "batch", "tau": 0.3}),
    ("simdis", {"mode": "outside_norm"}),
    ("splc", {"tau": 0.7, "margin": 0.3, "gamma": 0.5, "start_epoch": 0}),
    ("splc", {"margin_on_corrected": True, "start_epoch": 0}),
    ("supcon", {"tau": 0.5, "reduction": "batch"}),
    ("supcon", {"positives": "all", "empty_match": True}),
    ("supcon", {"reduction": "sum", "base_temperature": 0.07}),
    ("supcon_all", {"reduction": "batch", "base_temperature": 0.07, "tau": 0.07}),
    ("supcon_reg", {"positives": "all", "reduction": "sum"}),
    ("supcon_reg", {"tau": 0.3, "reduction": "batch"}),
    ("tie_aware", {"a": 0.3, "weight": 0.5}),
    ("wo_reg", {"alpha": 2.0, "reduction": "batch"}),
    ("wo_reg", {"alpha": -1.0, "proto_anchors": False}),
]


def total(terms: dict[str, Tensor]) -> Tensor:
    """The sum of the terms, which must be 0-dim."""
    assert all(term.ndim == 0 for term in terms.values())
    return torch.stack(list(terms.values())).sum()


def gradients_of(loss: nn.Module, outputs: Tensor, labels: Tensor, **context: Any) -> tuple[Tensor, list[Tensor]]:
    """Value and gradients of outputs and parameters; everything must be attached to the graph."""
    leaf = outputs.detach().clone().requires_grad_()
    terms = loss(leaf, labels, **context)
    for name, term in terms.items():
        assert term.requires_grad, f"{name} is not attached to the graph"
    value = total(terms)
    return value.detach(), list(torch.autograd.grad(value, [leaf, *loss.parameters()]))


def literal_gradients_of(
    name: str, loss: nn.Module, outputs: Tensor, labels: Tensor, *, memory: Memory | None, epoch: int, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """The same of the literal form."""
    leaf = outputs.detach().clone().requires_grad_()
    value = LITERALS[name](loss, leaf, labels, memory, epoch, **options)
    return value.detach(), list(torch.autograd.grad(value, [leaf, *loss.parameters()]))
