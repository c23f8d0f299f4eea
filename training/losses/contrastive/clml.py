"""CLML: low rank within each label, high rank overall, with missing labels corrected from the logits."""

from typing import Annotated, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hyperparameters import Choice, Flag, Number


class CLML(Loss):
    """Nuclear norms of the features of each label against that of the batch. Z are the raw features of the batch (not
    normalised), Z_k its rows with label k after correction, |.|_* the sum of singular values:

        clml = lam * (sum over labels k that some row has of max(floor, |Z_k|_*) - |Z|_*) / N

    The subgradient of |A|_* is U V' over the singular values above max(eps, machine epsilon * max(N, D) * largest
    one); it is 0 for a label at or below the floor. It respects the upstream gradient, which the published code
    ignores: under its GradScaler, that code trains practically without this term.

    Correction: from `start_epoch` on, a label also counts where sigmoid(logit) >= delta. It only adds labels, has no
    gradient and is used here only. Combine this loss with a classification loss of the logits, which keeps the observed
    labels. If every row has a label the value is at least 0; otherwise it may be negative.

    One QR and C + 1 SVDs: O(N^2 D + sum over k of n_k^2 min(N, D)).
    """

    kind = "contrastive"
    source = (
        "Ma et al., Label Structure Preserving Contrastive Embedding for Multi-Label Learning with Missing Labels, "
        "arXiv 2209.01314"
    )
    formula = "Eqs. 4, 6-10; code chuangua/ContrastiveLossMLML 7dcac9a"
    use = "missing labels: an addition to a classification loss, on the raw features before its layer"
    needs = ("a classification loss of the logits",)
    reads_logits = True

    lam: Annotated[float, Number("weight of the term", least=0)] = 1.0
    floor: Annotated[
        float, Number("a label's norm counts at least this much; 1 as in the code, 0 as in the paper", least=0)
    ] = 1.0
    delta: Annotated[
        float,
        Number(
            "probability from which an unobserved label counts; 0.7, 0.75 or 0.8 in the code, compared with > there",
            above=0,
            most=1,
        ),
    ] = 0.75
    start_epoch: Annotated[
        int, Number("first epoch, from 0, with correction; 1 as in the code", least=0, whole=True)
    ] = 1
    scale: Annotated[str, Choice('"mean" divides by N (the code), "none" does not (the paper)', ("mean", "none"))] = (
        "mean"
    )
    count_empty: Annotated[
        bool, Flag("a label without rows counts `floor`, as in the code; the gradient is the same")
    ] = False
    eps: Annotated[float, Number("singular values below this have no gradient", least=0)] = 1e-6

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "clml"; `batch.outputs` are features (N, D), `batch.logits` correct the labels if they are given."""
        belongs = batch.labels > 0
        if batch.logits is not None and batch.epoch >= self.start_epoch:
            belongs = belongs | (torch.sigmoid(batch.logits.detach()) >= self.delta)
        value = cast(Tensor, _NuclearContrast.apply(batch.outputs, belongs, self.floor, self.eps, self.count_empty))
        return {"clml": self.lam * (value / max(len(belongs), 1) if self.scale == "mean" else value)}


class _NuclearContrast(torch.autograd.Function):
    """Sum over labels of max(floor, nuclear norm of their rows), minus the nuclear norm of all rows (0-dim).

    features (N, D), belongs (N, C) bool. A label without rows counts `floor` if `count_empty`, else 0. It has its own
    backward, because autograd through singular values keeps the directions of those that are only noise.
    """

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
    @once_differentiable
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
