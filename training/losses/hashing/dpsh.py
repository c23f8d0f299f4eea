"""DPSH: the likelihood of pairwise similarity under inner products, and outputs near their signs."""

from typing import Annotated

from torch import Tensor

from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hashing.quantization import l2
from hashseek.training.losses.hyperparameters import Number
from hashseek.training.losses.numerics import inner_products, logistic, mean, share_label


class DPSH(Loss):
    """Pair likelihood. With theta the inner product of two outputs and S = 1 if they share a label:

        pairs        = mean over ordered pairs, those of a row with itself included, of
                       softplus(theta / 2) - S theta / 2
        quantization = eta * mean over entries of (u - sgn u)^2

    With a memory, the pairs are all of batch x memory. O(B^2 (K + C)), with a memory O(B Q (K + C)).
    """

    source = "Li et al., Feature Learning based Deep Supervised Hashing with Pairwise Labels, IJCAI 2016"
    formula = "DeepHash-pytorch ab14068; its value also authors' code (jiangqy 0423181)"
    use = "baseline on the likelihood of pairs"
    memory_kind = "raw"

    eta: Annotated[
        float,
        Number("weight of the quantisation; the authors' 50 is eta = 50 K / (number of training images)", least=0),
    ] = 0.1

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "pairs" and "quantization"."""
        ref, ref_y = batch.others
        theta = inner_products(batch.outputs, ref)
        pairs = mean(logistic(theta / 2, share_label(batch.labels, ref_y)))
        return {"pairs": pairs, "quantization": self.eta * l2(batch.outputs)}
