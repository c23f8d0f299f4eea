"""DHN: DPSH with a smooth quantiser, and optionally the choices of the authors' TensorFlow code."""

from typing import Annotated

from torch import Tensor

from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hashing.quantization import QUANTIZERS
from hashseek.training.losses.hyperparameters import Choice, Flag, Number
from hashseek.training.losses.numerics import inner_products, logistic, mean, normalize, share_label


class DHN(Loss):
    """Pair likelihood. With theta the inner product of two outputs and S = 1 if they share a label:

        pairs        = mean over ordered pairs, those of a row with itself included, of
                       softplus(inner theta) - S inner theta
        quantization = lam * mean over entries of log cosh(|u| - 1)

    With a memory, the pairs are all of batch x memory. O(B^2 (K + C)), with a memory O(B Q (K + C)).
    """

    source = "Zhu et al., Deep Hashing Network for Efficient Similarity Retrieval, AAAI 2016"
    formula = "authors' TensorFlow code (thulab)"
    use = "dpsh with a smooth quantiser; set balance where similar pairs are rare"
    memory_kind = "raw"

    lam: Annotated[float, Number("weight of the quantisation", least=0)] = 0.1
    inner: Annotated[
        float, Number("factor of the inner products; 0.5 as in both published codes, 1 as in the paper", above=0)
    ] = 0.5
    quantizer: Annotated[str, Choice('quantisation term; "square" in the TensorFlow code', tuple(QUANTIZERS))] = (
        "logcosh"
    )
    normed: Annotated[bool, Flag("theta is the cosine, the default of the TensorFlow code")] = False
    clip: Annotated[
        float | None, Number("clamp theta to [-clip, clip]; 15 in the TensorFlow code if not normed", above=0)
    ] = None
    balance: Annotated[bool, Flag("similar pairs weigh (all pairs) / (similar pairs), as in the TensorFlow code")] = (
        False
    )

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "pairs" and "quantization"."""
        ref, ref_y = batch.others
        theta = (
            inner_products(normalize(batch.outputs), normalize(ref))
            if self.normed
            else inner_products(batch.outputs, ref)
        )
        if self.clip is not None:
            theta = theta.clamp(-self.clip, self.clip)
        similar = share_label(batch.labels, ref_y)
        pairs = logistic(self.inner * theta, similar)
        if self.balance:
            heavier = similar.numel() / similar.sum().clamp_min(1)
            pairs = pairs * (1 + (heavier - 1) * similar)
        return {"pairs": mean(pairs), "quantization": self.lam * QUANTIZERS[self.quantizer](batch.outputs)}
