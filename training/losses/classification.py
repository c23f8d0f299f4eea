"""Classification losses: BCE, focal, ASL, ZLPR, Hill and SPLC, all of one logit per label."""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from hashseek.training.losses.base import ClassificationLoss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hyperparameters import Choice, Flag, Number
from hashseek.training.losses.numerics import log_one_plus_sum_exp, logistic, mean

REDUCTION = Choice("mean or sum; the published codes of ASL, Hill, SPLC and CLML sum", ("mean", "sum"))
GAMMA = Number("exponent of the focusing weights; 0 is the binary cross-entropy", least=0)
DETACH = Flag("no gradient through the weights, as in some published codes; the value stays the same")
MARGIN = Number("subtracted from the logits of positives")

_MLML = "Zhang et al., Simple and Robust Loss Design for Multi-Label Learning with Missing Labels, arXiv 2112.07368"


class BCE(ClassificationLoss):
    """Binary cross-entropy of the logits x, one label at a time.

        bce = - y log sigmoid(x) - (1 - y) log sigmoid(-x), mean or sum over all B C cells

    It is exact for logits of any size, where the code of CLML and ASL clamps the value at 18.4. O(B C).
    """

    source = "a textbook loss"
    formula = "code xinyu1205/robust-loss-mlml dcfa4d5, but exact where that is clamped"
    use = "the baseline of multi-label classification"

    reduction: Annotated[str, REDUCTION] = "mean"

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "bce"."""
        return {"bce": reduce(logistic(batch.outputs, batch.labels), self.reduction)}


class Focal(ClassificationLoss):
    """Focal loss without class balance. With q = sigmoid(x):

        focal = - y (1 - q)^gamma log q - (1 - y) q^gamma log(1 - q), mean or sum over all B C cells

    O(B C).
    """

    source = "Lin et al., Focal Loss for Dense Object Detection, ICCV 2017"
    formula = "Eq. 4; code xinyu1205/robust-loss-mlml dcfa4d5"
    use = "labels that are already predicted well count less"

    gamma: Annotated[float, GAMMA] = 2.0
    detach_weight: Annotated[bool, DETACH] = False
    reduction: Annotated[str, REDUCTION] = "mean"

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "focal"."""
        x, y = batch.outputs, batch.labels
        values = focal(torch.where(y > 0, x, -x), self.gamma, detach_weight=self.detach_weight)
        return {"focal": reduce(values, self.reduction)}


class ASL(ClassificationLoss):
    """Asymmetric loss. With q = sigmoid(x), and q_m = max(q - m, 0) for negatives only:

        asl = - y (1 - q)^gamma_pos log q - (1 - y) q_m^gamma_neg log(1 - q_m), mean or sum over all B C cells

    The comprehensive study (arXiv 2412.00101) shifts positives too and has other exponents: `gamma_pos = 0`,
    `gamma_neg = 1`, `m = 0`. O(B C).
    """

    source = "Ridnik et al., Asymmetric Loss For Multi-Label Classification, ICCV 2021"
    formula = "authors' code (Alibaba-MIIL/ASL 8c9e0bd)"
    use = "few labels per image among many: easy negatives drop out"

    gamma_pos: Annotated[float, Number("exponent of the weights of positives", least=0)] = 1.0
    gamma_neg: Annotated[float, Number("exponent of the weights of negatives", least=0)] = 4.0
    m: Annotated[float, Number("probability below which a negative has no loss", least=0, most=1)] = 0.05
    detach_weight: Annotated[bool, DETACH] = False
    reduction: Annotated[str, REDUCTION] = "mean"

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "asl"."""
        x = batch.outputs
        positives = focal(x, self.gamma_pos, detach_weight=self.detach_weight)
        q = torch.sigmoid(x)
        active = q > self.m
        # Inactive cells get 1 before the power, not only 0 after it: the gradient of a power may be infinite at 0.
        weight = torch.where(active, q - self.m, 1.0) ** self.gamma_neg
        # log(1 - q_m) = log(sigmoid(-x) + m), which stays finite where sigmoid(-x) underflows.
        log_rest = F.logsigmoid(-x)
        if self.m > 0:
            log_rest = torch.logaddexp(log_rest, torch.full_like(log_rest, math.log(self.m)))
        negatives = torch.where(active, -(weight.detach() if self.detach_weight else weight) * log_rest, 0.0)
        return {"asl": reduce(torch.where(batch.labels > 0, positives, negatives), self.reduction)}


class ZLPR(ClassificationLoss):
    """ZLPR loss, which ranks every label against the threshold 0:

        zlpr = mean or sum over rows of log(1 + sum over its labels of exp(-x))
                                      + log(1 + sum over the others of exp(x))

    The study's code does not add the maxima of its log-sum-exp back: its value is wrong, its gradient right. O(B C).
    """

    source = (
        "Su et al., ZLPR: A Novel Loss for Multi-label Classification, arXiv 2208.02955; Audibert et al., "
        "Multi-Label Contrastive Learning: A Comprehensive Study, arXiv 2412.00101"
    )
    formula = "Eq. 21 of the study"
    use = "every label ranked against the threshold 0; nothing to tune"

    reduction: Annotated[str, REDUCTION] = "mean"

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "zlpr"."""
        x, y = batch.outputs, batch.labels
        per_row = log_one_plus_sum_exp(-x, y > 0, dim=1) + log_one_plus_sum_exp(x, y == 0, dim=1)
        return {"zlpr": reduce(per_row, self.reduction)}


class Hill(ClassificationLoss):
    """Hill loss. With q = sigmoid(x) and q1 = sigmoid(x - margin):

        hill = - y (1 - q1)^gamma log q1 + (1 - y) (lam - q) q^2, mean or sum over all B C cells

    O(B C).
    """

    source = _MLML
    formula = "authors' code (xinyu1205/robust-loss-mlml dcfa4d5)"
    use = "missing labels: negatives that look positive count less"

    lam: Annotated[float, Number("q at which the weight of a negative is 0; 1.5 is steepest at q = 0.5")] = 1.5
    margin: Annotated[float, MARGIN] = 1.0
    gamma: Annotated[float, Number("exponent of the weights of positives", least=0)] = 2.0
    reduction: Annotated[str, REDUCTION] = "mean"

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "hill"."""
        x = batch.outputs
        q = torch.sigmoid(x)
        values = torch.where(batch.labels > 0, focal(x - self.margin, self.gamma), (self.lam - q) * q.square())
        return {"hill": reduce(values, self.reduction)}


class SPLC(ClassificationLoss):
    """SPLC loss: a focal loss that corrects missing labels.

    With F(x) = -(1 - sigmoid(x))^gamma log sigmoid(x), a cell is

        F(x - margin)    where the label is observed
        F(x)             where it is not, but epoch >= start_epoch and sigmoid(x) > tau: the label is corrected
        F(-x)            elsewhere

    and the loss is the mean or sum over all B C cells. O(B C).
    """

    source = _MLML
    formula = "authors' code (xinyu1205/robust-loss-mlml dcfa4d5)"
    use = "missing labels: labels that the network is confident of are added"

    tau: Annotated[
        float, Number("probability above which a label is corrected; 0.6 (authors), 0.7 (CLML's copy)", least=0, most=1)
    ] = 0.6
    margin: Annotated[float, MARGIN] = 1.0
    gamma: Annotated[float, GAMMA] = 2.0
    start_epoch: Annotated[int, Number("first epoch, from 0, with correction", least=0, whole=True)] = 1
    margin_on_corrected: Annotated[
        bool, Flag("also subtract the margin for corrected labels, one reading of the paper; the code does not")
    ] = False
    reduction: Annotated[str, REDUCTION] = "mean"

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The term "splc"."""
        x, observed = batch.outputs, batch.labels > 0
        present = observed
        if batch.epoch >= self.start_epoch:
            present = observed | (torch.sigmoid(x) > self.tau)
        shifted = present if self.margin_on_corrected else observed
        scores = torch.where(present, torch.where(shifted, x - self.margin, x), -x)
        return {"splc": reduce(focal(scores, self.gamma), self.reduction)}


def focal(scores: Tensor, gamma: float, *, detach_weight: bool = False) -> Tensor:
    """-(1 - p)^gamma log p of p = sigmoid(score), the probability of the correct answer, cell by cell."""
    # The power by way of the logarithm has a finite gradient for every gamma, also where 1 - p is 0.
    weight = torch.exp(gamma * F.logsigmoid(-scores))
    return -(weight.detach() if detach_weight else weight) * F.logsigmoid(scores)


def reduce(values: Tensor, reduction: str) -> Tensor:
    """Mean or sum of `values`."""
    return mean(values) if reduction == "mean" else values.sum()
