"""REG: MSC's balance with prototypes as anchors, and no push on positives that are already close."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.common import (
    check_batch,
    check_choice,
    check_flag,
    check_number,
    check_sizes,
    inner_products,
    memory_rows,
    normalize,
)
from hashseek.training.losses.contrastive.contrast_sets import (
    REDUCTIONS,
    all_positives,
    any_positives,
    check_tau,
    contrast,
    log_softmax,
    new_prototypes,
    overlaps,
    reduce_anchors,
    scores_of,
    some,
    weighted_sum,
)


class Reg(nn.Module):
    """REG, and W/O-REG without the penalty (Audibert et al., arXiv 2412.00101, Eqs. 11, 15-19; code audibert-
    alexandre-fra/Multi-label-contrastive-comprehensive 0e509a5).

    The batch is followed by the C prototypes, prototype j carrying label j alone; all n = B + C are anchors. For
    anchor i and any other l, s_il = cos / tau and sigma_il = p_il as in SupCon over all l but i:

        f_il      = (share of the labels of l that i has) ** alpha, 0 if they share none
        N_ij      = sum of f_il over the l that carry j
        Lambda_il = f_il * mean over the labels j of i of [l carries j] / N_ij                rows sum to 1
        loss_i    = - sum over l of Lambda_il log p_il
                    - sum over l with Lambda_il > 0 of max(0, sigma_il - Lambda_il) s_il      penalty, sigma detached

    so the gradient at s_il is min(0, sigma - Lambda) on positives and sigma elsewhere: no positive is pushed away.
    The penalty lowers the value without bound: do not choose a model by it, look at `repulsed` instead.
    Eqs. 16 and 18 print no minus before the logarithm; this has it. O(n A (D + C)) time, O(n A) memory with A = n.

    With a memory, the contrast set is the memory and the prototypes; anchors stay the batch and the prototypes.

    Args:
        n_classes: C, number of labels.
        n_bits: D, width of the outputs.
        alpha: how much rows with further labels are discounted; 0 not at all, below 0 entirely (f = 1 where i has
            every label of l, else 0).
        penalty: False leaves the second sum out (W/O-REG).
        tau: temperature.
        proto_anchors: False lets only the B outputs be anchors.
        reduction: "valid" divides by the outputs with a label and the prototypes whose label occurs in the batch (the
            code; other prototypes are no anchors), "batch" by all anchors, "sum" by 1.
        reg_algorithm2: the paper's Algorithm 2 with its shapes mended, out of curiosity: no prototypes, alpha = 0,
            log p weighted by Lambda times the number of labels of i, everything divided by B.

    Raises:
        BadConfig: tau <= 0, alpha not a number, unknown reduction, or reg_algorithm2 with an alpha, another reduction
            or proto_anchors=False.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        alpha: float = 0.0,
        penalty: bool = True,
        tau: float = 0.1,
        proto_anchors: bool = True,
        reduction: str = "valid",
        reg_algorithm2: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_tau(tau)
        check_number("alpha", alpha, "is the power of a share")
        check_choice("reduction", reduction, REDUCTIONS)
        check_flag("penalty", penalty)
        check_flag("proto_anchors", proto_anchors)
        check_flag("reg_algorithm2", reg_algorithm2)
        if reg_algorithm2 and alpha != 0:
            raise BadConfig(f"reg_algorithm2 knows no alpha: set alpha to 0, not {alpha}")
        if reg_algorithm2 and not proto_anchors:
            raise BadConfig("reg_algorithm2 has no prototypes, as anchors or otherwise: leave proto_anchors=False out")
        if reg_algorithm2 and reduction == "sum":
            raise BadConfig("reg_algorithm2 divides by the batch: leave reduction='sum' out")
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.alpha = alpha
        self.penalty = penalty
        self.tau = tau
        self.proto_anchors = proto_anchors
        self.reduction = "batch" if reg_algorithm2 else reduction
        self.reg_algorithm2 = reg_algorithm2
        self.prototypes = None if reg_algorithm2 else new_prototypes(n_classes, n_bits)

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,
        logits: Tensor | None = None,  # noqa: ARG002 - part of the common contract
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Terms {"contrast", "penalty"} (without penalty only the first) of outputs (B, D) with labels (B, C).

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or rows that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            scores, weights, n_labels, valid = self._scores_and_weights(outputs, labels, memory)
            # Algorithm 2 forgets the division by |S_i| in the logarithmic sum, not in the comparison.
            log_weights = weights * n_labels[:, None] if self.reg_algorithm2 else None
            return regularised(scores, weights, log_weights, valid, self.reduction, penalty=self.penalty)

    @torch.no_grad()
    def repulsed(self, outputs: Tensor, labels: Tensor, *, memory: object = None) -> Tensor:
        """Share (0-dim) of the positive pairs that the plain loss pushes apart, sigma > Lambda (PRR, App. A.2).

        About 0.38 at tau = 0.1 in the paper; 0 without positive pairs. Outputs (B, D), labels (B, C).
        """
        with torch.autocast(outputs.device.type, enabled=False):
            scores, weights, *_ = self._scores_and_weights(outputs, labels, memory)
            positive = weights > 0
            pushed = positive & (log_softmax(scores).exp() > weights)
            return pushed.sum() / positive.sum().clamp_min(1)

    def _scores_and_weights(
        self, outputs: Tensor, labels: Tensor, memory: object
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tempered scores (n, A) without self, Lambda (n, A), numbers of labels (n,) and which anchors count (n,)."""
        outputs, y = check_batch(outputs, labels, n_classes=self.n_classes, n_bits=self.n_bits)
        z = normalize(outputs)
        queue = memory_rows(memory, outputs, n_classes=self.n_classes, n_bits=self.n_bits)
        ref, ref_y = (z, y) if queue is None else (normalize(queue[0]), queue[1])
        anchor = torch.arange(len(y), device=y.device)
        own = [(anchor, anchor)] if queue is None else []
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


class SupConReg(nn.Module):
    """SupConReg: SupCon with REG's penalty, without prototypes (Audibert et al., arXiv 2412.00101, Eq. 25).

    With P(i) as in SupCon, Lambda_il = 1 / |P(i)| on P(i) and 0 elsewhere, sigma_il = p_il detached:

        loss_i = - sum over l of Lambda_il log p_il - sum over l in P(i) of max(0, sigma_il - Lambda_il) s_il

    A(i) is the batch without i, or exactly the memory. O(B A (D + C)).

    Args:
        n_classes: C, number of labels.
        n_bits: D, width of the outputs.
        positives: "any" (a shared label) or "all" (the same labels).
        tau: temperature.
        reduction: "valid" divides by the anchors that have a positive, "batch" by B, "sum" by 1.

    Raises:
        BadConfig: tau <= 0, unknown positives or reduction.
    """

    def __init__(
        self,
        *,
        n_classes: int,
        n_bits: int,
        positives: str = "any",
        tau: float = 0.1,
        reduction: str = "valid",
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_bits)
        check_choice("positives", positives, ("any", "all"))
        check_tau(tau)
        check_choice("reduction", reduction, REDUCTIONS)
        self.n_classes = n_classes
        self.n_bits = n_bits
        self.positives = positives
        self.tau = tau
        self.reduction = reduction

    def forward(
        self,
        outputs: Tensor,
        labels: Tensor,
        *,
        memory: object = None,
        logits: Tensor | None = None,  # noqa: ARG002 - part of the common contract
        epoch: int = 0,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Terms {"contrast", "penalty"} of outputs (B, D) with labels (B, C), against `memory`.

        Raises:
            BadCodes: wrong shapes, labels that are not 0/1, or rows that are NaN or infinite.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            c = contrast(outputs, labels, memory, n_classes=self.n_classes, n_bits=self.n_bits)
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
    # Labels of an anchor that nothing carries have an N of 0 (or, with a large alpha, one too small to divide by).
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
        contrast_of = -weighted_sum(weights if log_weights is None else log_weights, log_softmax(scores))
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
        log_p = log_softmax(scores)
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
