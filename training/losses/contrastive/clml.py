"""CLML: low rank within each label, high rank overall, with missing labels filled in from the logits."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.common import (
    check_at_least,
    check_batch,
    check_choice,
    check_count,
    check_flag,
    check_logits,
    check_number,
    check_sizes,
)


class CLML(nn.Module):
    """CLML: nuclear norms of the features of each label against that of the batch (Ma et al., "Label Structure
    Preserving Contrastive Embedding for Multi-Label Learning with Missing Labels", arXiv 2209.01314, Eqs. 4, 6-10;
    code chuangua/ContrastiveLossMLML 7dcac9a).

    Z are the raw features of the batch (not normalised), Z_k its rows with label k after correction, |.|_* the sum of
    singular values:

        loss = lam * (sum over labels k that some row has of max(floor, |Z_k|_*) - |Z|_*) / N

    The subgradient of |A|_* is U V' over the singular values above max(eps, machine epsilon * max(N, D) * largest
    one); it is 0 for a label at or below the floor. It respects the upstream gradient, which the published code
    ignores: under its GradScaler that code trains practically without this term.

    Correction: from `start_epoch` on, a label also counts where sigmoid(logit) >= delta. It only adds labels, has no
    gradient and is used here only. Add a classification loss of the logits beside this one; it keeps the observed
    labels. If every row has a label the value is at least 0; otherwise it may be negative.

    One QR and C + 1 SVDs: O(N^2 D + sum over k of n_k^2 min(N, D)).

    Args:
        n_classes: C, number of labels.
        n_bits: D, width of the features, e.g. 2048.
        lam: weight of the term.
        floor: Delta, a label's norm counts at least this much; 1 as in the code, 0 as in the paper.
        delta: probability from which an unobserved label counts, in (0, 1].
        start_epoch: first epoch, counted from 0, with correction.
        scale: "mean" divides by N (the code), "none" does not (the paper).
        count_empty: let a label without rows count `floor` as in the code; the gradient is the same.
        eps: singular values below this have no gradient.

    Raises:
        BadConfig: lam, floor, eps or start_epoch < 0, delta outside (0, 1], or unknown scale.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        lam: float = 1.0,
        floor: float = 1.0,
        delta: float = 0.75,
        start_epoch: int = 1,
        scale: str = "mean",
        count_empty: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_at_least("lam", lam, 0, "weighs the term")
        check_at_least("floor", floor, 0, "is the least norm of a label")
        check_count("start_epoch", start_epoch, 0, "is the first epoch with correction")
        check_at_least("eps", eps, 0, "is compared with singular values")
        check_flag("count_empty", count_empty)
        check_choice("scale", scale, ("mean", "none"))
        check_number("delta", delta, "is compared with probabilities")
        if not 0 < delta <= 1:
            raise BadConfig(f"delta is compared with probabilities and must lie in (0, 1], not {delta}: 0.75 is usual")
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.lam = lam
        self.floor = floor
        self.delta = delta
        self.start_epoch = start_epoch
        self.scale = scale
        self.count_empty = count_empty
        self.eps = eps

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,  # noqa: ARG002 - part of the common contract
        logits: Tensor | None = None,
        epoch: int = 0,
    ) -> dict[str, Tensor]:
        """Term {"clml"} of features (N, D) with labels (N, C); logits (N, C) correct the labels if they are given.

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or features or logits that are NaN or
                infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            features, y = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
            belongs = y > 0
            if logits is not None:
                sizes = {"n_classes": self.n_classes, "n_bits": self.n_bits}
                logits, _ = check_logits(outputs, labels, logits, **sizes)
                if epoch >= self.start_epoch:
                    belongs = belongs | (torch.sigmoid(logits.detach()) >= self.delta)
            n_rows = max(len(features), 1)
            value = nuclear_contrast(features, belongs, self.floor, self.eps, self.count_empty)
            return {"clml": self.lam * (value / n_rows if self.scale == "mean" else value)}


def nuclear_contrast(features: Tensor, belongs: Tensor, floor: float, eps: float, count_empty: bool) -> Tensor:
    """Sum over labels of max(floor, nuclear norm of their rows), minus the nuclear norm of all rows (0-dim).

    features (N, D), belongs (N, C) bool. A label without rows counts `floor` if `count_empty`, else 0.
    """
    return cast(Tensor, _NuclearContrast.apply(features, belongs, floor, eps, count_empty))


class _NuclearContrast(torch.autograd.Function):
    """Own backward, because autograd through singular values keeps the directions of those that are only noise."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, belongs: Tensor, floor: float, eps: float, count_empty: bool) -> Tensor:
        n_rows, width = features.shape
        # All row subsets live in the row space of the features, which has at most N dimensions: one QR turns the
        # N x D features into N x N ones with the same singular values, and every SVD below is a small one.
        basis = None
        rows = features
        if n_rows < width:
            basis, triangle = torch.linalg.qr(features.mT)
            rows = triangle.mT
        relative = torch.finfo(rows.dtype).eps * max(n_rows, width)
        norm, direction = nuclear_norm(rows, eps, relative)
        value = -norm
        gradient = -direction
        for label in range(belongs.shape[1]):
            members = belongs[:, label].nonzero().squeeze(1)
            if len(members) == 0:
                value = value + (floor if count_empty else 0.0)
                continue
            norm, direction = nuclear_norm(rows[members], eps, relative)
            value = value + norm.clamp_min(floor)
            gradient.index_add_(0, members, torch.where(norm > floor, direction, 0.0))
        ctx.save_for_backward(gradient if basis is None else gradient @ basis.mT)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return upstream * gradient, None, None, None, None


def nuclear_norm(rows: Tensor, eps: float, relative: float) -> tuple[Tensor, Tensor]:
    """Nuclear norm (0-dim) of rows (n, D) and its subgradient U V' (n, D).

    Singular values below max(eps, relative * the largest) have no part in the subgradient.
    """
    if rows.numel() == 0:
        return rows.new_zeros(()), torch.zeros_like(rows)
    u, s, v = torch.linalg.svd(rows, full_matrices=False)
    kept = s >= (relative * s[0]).clamp_min(eps)
    return s.sum(), (u * kept) @ v
