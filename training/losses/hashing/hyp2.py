"""HyP2: proxies for labels, plus a push between multi-label samples that share none; and its ablations."""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.base import Loss
from hashseek.training.losses.batches import Batch
from hashseek.training.losses.hashing.centres import new_proxies
from hashseek.training.losses.hashing.zeta import zeta as best_zeta
from hashseek.training.losses.hyperparameters import Choice, Number
from hashseek.training.losses.numerics import inner_products, mean_where, normalize, share_label

PARTS = ("proxy+irrelevant", "proxy", "pair", "proxy+pair")


class HyP2(Loss):
    """Proxies and irrelevant pairs. With c_ij = cos(output i, proxy j):

        proxy      = mean over y_ij = 1 of (offset - c_ij)  +  mean over y_ij = 0 of relu(c_ij - zeta)
        irrelevant = beta * mean over ordered pairs (i, k) that both have more than one label and share none
                     of relu(cos(output i, output k) - zeta)

    Every mean divides by all its cells, inactive ones included; an empty set gives 0. The cosine is signed, as in the
    authors' code and Eq. 6 (Eq. 2 prints an absolute value). O(B C K + B^2 (K + C)).

    The ablations of Table 5 have neither formula nor code in the paper. Here their pair term is the proxy term with
    samples in place of proxies, over ordered pairs of different rows with any number of labels:

        pair       = mean over pairs that share a label of (offset - cos)  +  mean over the others of relu(cos - zeta)

    The proxies (C, K) are the parameter `proxies`; without the proxy term there are none.
    """

    source = "Xu et al., HyP2 Loss: Beyond Hypersphere Metric Space for Multi-label Image Retrieval, ACM MM 2022"
    formula = "Eqs. 2-4; code JerryXu0129/HyP2-Loss e9c1c24"
    use = "cheap: it compares only with C proxies and the batch; few hyperparameters"
    needs: ClassVar[tuple[str, ...]] = ("proxies (learned)",)

    beta: Annotated[
        float,
        Number(
            "weight of the pairs of samples relative to the proxies; 1.0 for Flickr, 0.5 for VOC (Table 5), useful in "
            "[0.5, 1.25]",
            least=0,
        ),
    ] = 0.5
    zeta: Annotated[
        float,
        Number(
            "margin; none: the exact value for K and C from coding theory, for up to 256 of both",
            least=-1,
            most=1,
            derived=lambda loss: best_zeta(loss.n_bits, loss.n_classes),
        ),
    ]
    offset: Annotated[float, Number("constant of the positive term; 1 as in the code, 0 as in the paper")] = 1.0
    parts: Annotated[str, Choice("the terms: the method, or an ablation", PARTS)] = "proxy+irrelevant"

    proxies: nn.Parameter | None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if "+" not in self.parts and self.beta != 0.5:
            raise BadConfig(
                f"beta weighs pairs against proxies, but parts {self.parts!r} is one term: leave out beta={self.beta!r}"
            )
        self.proxies = new_proxies(self.n_classes, self.n_bits) if "proxy" in self.parts else None

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """The terms "proxy" and "irrelevant", or those that `parts` names."""
        z, y = normalize(batch.outputs), batch.labels
        terms = {}
        if self.proxies is not None:
            cosines = inner_products(z, normalize(self.proxies.to(z.dtype)))
            terms["proxy"] = self._pull(cosines, y) + self._push(cosines, 1 - y)
        if self.parts == "proxy":
            return terms
        cosines, share = inner_products(z, z), share_label(y, y)
        if self.parts == "proxy+irrelevant":
            several = (y.sum(dim=1) > 1).to(y)
            terms["irrelevant"] = self.beta * self._push(cosines, several[:, None] * several * (1 - share))
        else:
            others = torch.ones_like(share).fill_diagonal_(0)
            pair = self._pull(cosines, others * share) + self._push(cosines, others * (1 - share))
            terms["pair"] = pair if self.parts == "pair" else self.beta * pair
        return terms

    def _pull(self, cosines: Tensor, cells: Tensor) -> Tensor:
        return mean_where(self.offset - cosines, cells)

    def _push(self, cosines: Tensor, cells: Tensor) -> Tensor:
        return mean_where((cosines - self.zeta).relu(), cells)


class HyP2Proxy(HyP2):
    """The proxy term of HyP2 alone."""

    formula = "Table 5, the proxy term of Eq. 2"
    use = "ablation of hyp2, and equal to it where no image has two labels"
    parts = "proxy"
    beta = 0.5


class HyP2Pair(HyP2):
    """The pair term of HyP2's ablations alone."""

    formula = "Table 5, our formula"
    use = "ablation of hyp2: pairs of images without proxies"
    needs = ()
    parts = "pair"
    beta = 0.5


class HyP2ProxyPair(HyP2):
    """The proxy and the pair term of HyP2's ablations."""

    formula = "Table 5, our formula"
    use = "ablation of hyp2: all pairs in addition to the proxies, not only irrelevant ones"
    parts = "proxy+pair"
