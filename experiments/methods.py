"""The methods of a comparison, their settings, and what their searches may choose."""

from dataclasses import dataclass, field
from typing import Any

Space = dict[str, Any]


def log_space(low: float, high: float) -> Space:
    """Numbers between `low` and `high`, drawn by their logarithm."""
    return {"low": low, "high": high, "log": True}


# What every search may choose. Small steps suit a layer that starts from ITQ.
_ALL: Space = {
    "optimizer.lr": log_space(3e-5, 1e-2),
    "model.dropout": [0.0, 0.3, 0.6, 0.8],
}
_PROXIES: Space = {**_ALL, "optimizer.proxy_lr": log_space(1e-4, 1e-1)}
_BETA: Space = {"loss.beta": [0.5, 0.75, 1.0, 1.25, 1.5]}
_A: Space = {"loss.a": log_space(0.5, 30.0)}  # for one bit, see `POWERS`
_MARGIN = [0.0, 0.1, 0.2, 0.3]
# Contrastive losses see only directions: the quantisation pulls them to the corners of the cube.
_TAU: Space = {"loss.tau": log_space(0.05, 2.0), "loss.quantization.weight": log_space(3e-3, 3.0)}
_COS = ('loss.quantization={kind="cos", weight=0.1}',)
# Those of mirflickr25k_mobilenet_v2_bihalf_64. A search would choose by labels, which this loss must not use.
_BIHALF = ("loss.gamma=60", "optimizer.lr=0.001", "model.dropout=0", "train.epochs=10")


@dataclass(frozen=True)
class Method:
    """One row of the table.

    settings: overrides of the configuration. random_start: more of them, where the hash layer does not start from ITQ.
    space: what is searched, for codes of one bit, see `space_at`; if it is empty, the settings are fixed. fitted: a
    method without training, see `fitted`.
    """

    title: str
    settings: tuple[str, ...] = ()
    random_start: tuple[str, ...] = ()
    space: Space = field(default_factory=dict)
    fitted: str | None = None


def _loss(title: str, name: str, space: Space, *settings: str) -> Method:
    return Method(title, (f"loss.name={name}", *settings), space=space)


METHODS: dict[str, Method] = {
    "tie_aware": _loss("Tie-aware (ours)", "tie_aware", {**_ALL, **_A, "loss.weight": [0.5, 1.0, 3.0, 6.0, 12.0]}),
    "tie_aware_pairs": _loss("Tie-aware, weight 0", "tie_aware", {**_ALL, **_A}, "loss.weight=0"),
    "hyp2": _loss("HyP2", "hyp2", {**_PROXIES, **_BETA}),
    "hyp2_pair": _loss("HyP2, pair term with all pairs", "hyp2_pair", _ALL),
    "hyp2_proxy": _loss("HyP2, proxy term", "hyp2_proxy", _PROXIES),
    "hyp2_proxy_pair": _loss("HyP2, proxy term and pair term with all pairs", "hyp2_proxy_pair", {**_PROXIES, **_BETA}),
    "dsh": _loss("DSH", "dsh", {**_ALL, "loss.alpha": log_space(1e-3, 1e-1), "loss.m": log_space(0.3, 20)}),
    "dpsh": _loss("DPSH", "dpsh", {**_ALL, "loss.eta": log_space(1e-3, 10.0)}),
    "dhn": _loss("DHN", "dhn", {**_ALL, "loss.lam": log_space(1e-3, 10.0), "loss.inner": log_space(0.5, 30.0)}),
    "hashnet": _loss("HashNet", "hashnet", {**_ALL, **_A, "loss.continuation": ["epoch", "iteration", "none"]}),
    "idhn": _loss("IDHN", "idhn", {**_ALL, "loss.gamma": log_space(1e-3, 1.0), "loss.alpha": log_space(3e-3, 1.0)}),
    "csq": _loss("CSQ", "csq", {**_ALL, "loss.lam": log_space(1e-4, 1.0)}),
    "orthohash": Method(
        "OrthoHash",
        ("loss.name=orthohash",),
        ("model.head=linear_bn",),  # as in its paper; ITQ fits a single layer
        {**_ALL, "loss.s": log_space(0.5, 32.0), "loss.m": _MARGIN},
    ),
    "proxy_anchor": _loss(
        "Proxy Anchor", "proxy_anchor", {**_PROXIES, "loss.alpha": log_space(0.5, 64.0), "loss.delta": _MARGIN}
    ),
    "mulsupcon": _loss("MulSupCon + quantisation", "mulsupcon", {**_ALL, **_TAU}, *_COS),
    "reg": _loss("REG + quantisation", "reg", {**_PROXIES, **_TAU}, *_COS),
    "msc": _loss("MSC + quantisation", "msc", {**_PROXIES, **_TAU}, *_COS),
    "simdis": _loss("SimDis (outside) + quantisation", "simdis", {**_ALL, **_TAU}, "loss.mode=outside", *_COS),
    "hbl": _loss(
        "HBL + quantisation",
        "hbl",
        {**_ALL, **_TAU, "loss.lam": log_space(1e-3, 1.0)},
        "memory.size=2048",
        "memory.momentum=0.99",
        *_COS,
    ),
    "bihalf": _loss("BiHalf, no labels", "bihalf", {}, *_BIHALF),
    "random": Method("Random rotation, no labels", fitted="random"),
    "pca": Method("PCA, no labels", fitted="pca"),
    "itq": Method("ITQ, no labels", fitted="itq"),
    "weighted_itq": Method("Weighted ITQ, no labels", fitted="weighted_itq"),
    "itq_cca": Method("ITQ-CCA", fitted="itq_cca"),
    "gallery_itq": Method("ITQ fitted to the gallery, no labels", fitted="gallery_itq"),
    "cosine": Method("Cosine of the features, no code", fitted="cosine"),
}
"""Ours, rows of HyP2's Table 3, contrastive losses with a quantisation term, a loss without labels, untrained
layers, and the features themselves."""

COMPARED = tuple(name for name in METHODS if not name.startswith("hyp2_"))
"""Those of the comparison; the others are ablations for HyP2's own tables."""

# Settings that depend on the code length K, as K to this power: inner products and squared distances are sums over the
# bits, so the factor of an inner product falls with K, and the margin of a distance grows.
POWERS: dict[str, dict[str, int]] = {
    "tie_aware": {"loss.a": -1},
    "tie_aware_pairs": {"loss.a": -1},
    "hashnet": {"loss.a": -1},
    "dhn": {"loss.inner": -1},
    "dsh": {"loss.m": 1},
}


def space_at(method: str, n_bits: int) -> Space:
    """What a search at this length may choose."""
    space = dict(METHODS[method].space)
    for name, power in POWERS.get(method, {}).items():
        low, high = (space[name][end] * n_bits**power for end in ("low", "high"))
        space[name] = log_space(low, high)
    return space
