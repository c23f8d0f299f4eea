"""REG: MSC's balance with prototypes as anchors, and no push on positives that are already close."""

from typing import Annotated, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.contrastive.base_proto import STUDY
from hashseek.training.losses.contrastive.contrast_sets import (
    POSITIVES,
    ContrastiveLoss,
    all_positives,
    any_positives,
    contrast,
    new_prototypes,
    overlaps,
    reduce_anchors,
    scores_of,
    some,
    weighted_sum,
)
from hashseek.training.losses.hyperparameters import Flag, Number
from hashseek.training.losses.numerics import inner_products, normalize


class Reg(ContrastiveLoss):
    """Balanced labels with a penalty.

    The batch is followed by the C prototypes, prototype j carrying label j alone; all n = B + C are anchors. For anchor
    i and any other l, s_il = cos / tau and sigma_il = p_il as in SupCon over all l but i:

        f_il      = (share of the labels of l that i has) ** alpha, 0 if they share none
        N_ij      = sum of f_il over the l that carry j
        Lambda_il = f_il * mean over the labels j of i of [l carries j] / N_ij                rows sum to 1
        loss_i    = - sum over l of Lambda_il log p_il
                    - sum over l with Lambda_il > 0 of max(0, sigma_il - Lambda_il) s_il      penalty, sigma detached

    so the gradient at s_il is min(0, sigma - Lambda) on positives and sigma elsewhere: no positive is pushed away.
    The penalty lowers the value without bound: do not choose a model by it.
    Eqs. 16 and 18 print no minus before the logarithm; this has it. Table 6 has alpha 0 and 1. O(n A (D + C)) time,
    O(n A) memory with A = n.

    The mean is over the valid anchors: outputs with a label, and prototypes whose label occurs in the batch. With a
    memory, the contrast set is the memory and the prototypes; anchors stay the batch and the prototypes.
    """

    source = STUDY
    formula = "Eqs. 11, 15-19; code audibert-alexandre-fra/Multi-label-contrastive-comprehensive 0e509a5"
    use = "as wo_reg, and positives that are close enough are no longer pushed apart"
    needs = ("prototypes (learned)",)

    alpha: Annotated[
        float,
        Number(
            "discount of rows with further labels: 0 none; below 0 full, f = 1 only where i has every label of l "
            "(a threshold, as in the code)",
            most=10,  # with many labels, higher powers underflow
        ),
    ] = 0.0
    penalty: Annotated[bool, Flag("false leaves the second sum out (W/O-REG)")] = True
    proto_anchors: Annotated[bool, Flag("false lets only the B outputs be anchors")] = True
    reg_algorithm2: Annotated[
        bool,
        Flag(
            "the paper's Algorithm 2 with its shapes corrected, for curiosity: no prototypes, alpha = 0, log p "
            "weighted by Lambda times the number of labels of i, everything divided by B"
        ),
    ] = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.reg_algorithm2:
            if self.alpha != 0 or not self.proto_anchors or self.reduction == "sum":
                raise BadConfig(
                    "reg_algorithm2 has no alpha and no prototypes, and divides by the batch: it does not take "
                    f"alpha={self.alpha!r}, proto_anchors={self.proto_anchors!r}, reduction={self.reduction!r}"
                )
            self.reduction = "batch"
        self.prototypes = None if self.reg_algorithm2 else new_prototypes(self.n_classes, self.n_bits)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "contrast" and "penalty"; without penalty only the first."""
        scores, weights, n_labels, valid = self._scores_and_weights(batch)
        # Algorithm 2 forgets the division by |S_i| in the logarithmic sum, not in the comparison.
        log_weights = weights * n_labels[:, None] if self.reg_algorithm2 else None
        return regularised(scores, weights, log_weights, valid, self.reduction, penalty=self.penalty)

    def _scores_and_weights(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tempered scores (n, A) without self, Lambda (n, A), numbers of labels (n,) and which anchors count (n,)."""
        c = contrast(batch)
        z, y, ref, ref_y = c.z, c.y, c.ref, c.ref_y
        anchor = torch.arange(len(y), device=y.device)
        own = [(anchor, anchor)] if c.in_batch else []
        valid = y.sum(dim=1)
        if self.prototypes is not None:
            p = normalize(self.prototypes.to(z.dtype))
            p_y = torch.eye(self.n_classes, dtype=y.dtype, device=y.device)
            if self.proto_anchors:
                label = torch.arange(self.n_classes, device=y.device)
                own.append((len(z) + label, len(ref) + label))
                valid = torch.cat([valid, y.sum(dim=0)])
                z, y = torch.cat([z, p]), torch.cat([y, p_y])
            ref, ref_y = torch.cat([ref, p]), torch.cat([ref_y, p_y])
        shared = y @ ref_y.T
        scores = inner_products(z / self.tau, ref)
        # An anchor does not meet itself; see `lowest_on_diagonal` for the score. Its gradient is 0, graph or not.
        with torch.no_grad():
            for pairs in own:
                shared[pairs] = 0
                scores[pairs] = torch.finfo(scores.dtype).min
        valid = valid.clamp_(max=1)
        weights = label_shares(shared, y, ref_y, self.alpha).mul_(valid[:, None])
        return scores, weights, y.sum(dim=1), valid


class WithoutReg(Reg):
    """REG without its penalty."""

    formula = "Eqs. 11 and 15, W/O-REG; code audibert-alexandre-fra/Multi-label-contrastive-comprehensive 0e509a5"
    use = "msc whose prototypes are anchors too; the baseline for reg"
    penalty = False


class SupConReg(ContrastiveLoss):
    """SupCon with REG's penalty, without prototypes. With P(i) as in SupCon, Lambda_il = 1 / |P(i)| on P(i) and 0
    elsewhere, sigma_il = p_il detached:

        loss_i = - sum over l of Lambda_il log p_il - sum over l in P(i) of max(0, sigma_il - Lambda_il) s_il

    A(i) is the batch without i, or exactly the memory. O(B A (D + C)).
    """

    source = STUDY
    formula = "Eq. 25"
    use = "the regulariser of reg on plain supcon, without prototypes"

    positives: Annotated[str, POSITIVES] = "any"

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "contrast" and "penalty"."""
        c = contrast(batch)
        shared = overlaps(c)
        positive = any_positives(shared) if self.positives == "any" else all_positives(shared, c)
        weights = positive / positive.sum(dim=1, keepdim=True).clamp_min_(1)
        scores = scores_of(c, self.tau)
        return regularised(scores, weights, None, some(weights), self.reduction, penalty=True)


def label_shares(shared: Tensor, y: Tensor, ref_y: Tensor, alpha: float) -> Tensor:
    """Lambda (n, A) of anchors with labels y (n, C) and contrast rows with labels ref_y (A, C); see `Reg`.

    `shared` (n, A) counts common labels and is 0 for an anchor with itself; it becomes the result.
    """
    if alpha == 0:
        f = shared.clamp_(max=1)
    else:
        share = shared.div_(ref_y.sum(dim=1).clamp_min(1))
        f = share.floor_() if alpha < 0 else share.pow_(alpha)  # below 0 only a full share counts
    per_label = f @ ref_y
    # N is 0 for labels of an anchor that nothing carries, and too small to divide by if f underflows.
    held = per_label > torch.finfo(f.dtype).tiny
    quotient = torch.where(held, y / torch.where(held, per_label, 1.0), 0.0)
    return f.mul_((quotient / y.sum(dim=1, keepdim=True).clamp_min(1)) @ ref_y.T)


def regularised(
    scores: Tensor, weights: Tensor, log_weights: Tensor | None, valid: Tensor, reduction: str, *, penalty: bool
) -> dict[str, Tensor]:
    """Terms of REG from tempered scores (n, A) and weights Lambda (n, A) of the positives.

    `log_weights` weigh log p in Algorithm 2; elsewhere Lambda does. `valid` (n,) anchors count in the mean.
    """
    if not penalty:
        contrast_of = -weighted_sum(weights if log_weights is None else log_weights, scores.log_softmax(dim=1))
        return {"contrast": reduce_anchors(contrast_of, valid, reduction)}
    contrast_of, penalty_of = _Regularised.apply(scores, weights, log_weights)
    return {
        "contrast": reduce_anchors(contrast_of, valid, reduction),
        "penalty": reduce_anchors(penalty_of, valid, reduction),
    }


class _Regularised(torch.autograd.Function):
    """Both sums of each anchor, with their gradients at the scores: sigma sum Lambda - Lambda, and minus the excess.

    Left to autograd, this takes half as long again.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, weights: Tensor, log_weights: Tensor | None) -> tuple[Tensor, Tensor]:
        log_p = scores.log_softmax(dim=1)
        if log_weights is None:
            log_weights = weights
        scratch = log_weights * log_p
        contrast_of = -scratch.sum(dim=1)
        sigma = log_p.exp_()
        excess = torch.sub(sigma, weights).relu_().mul_(torch.sign(weights, out=scratch))  # 0 outside the positives
        penalty_of = -torch.mul(excess, scores, out=scratch).sum(dim=1)
        ctx.save_for_backward(sigma.mul_(log_weights.sum(dim=1, keepdim=True)).sub_(log_weights), excess)
        return contrast_of, penalty_of

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_contrast: Tensor, of_penalty: Tensor) -> tuple[Tensor, None, None]:
        slopes, excess = ctx.saved_tensors
        return (slopes * of_contrast[:, None]).addcmul_(excess, of_penalty[:, None], value=-1), None, None
