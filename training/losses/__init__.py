"""Losses behind one contract, one file per method.

    loss = build_loss("hyp2", n_classes=C, n_bits=K, beta=0.5)
    terms = loss(outputs, labels, epoch=epoch)      # outputs (B, K) float, labels (B, C) 0/1
    sum(terms.values()).backward()

Every loss returns its weighted terms by name as 0-dim tensors; their sum is what is minimised. Proxies, prototypes
and centres are parameters or buffers of the module. Adding a loss is one file and one line in `LOSSES`.

Any loss takes a quantisation term, and any loss of the outputs can be laid on prefixes of the code:

    build_loss("hyp2", n_classes=C, n_bits=64, quantization={"kind": "l2", "weight": 0.1}, nested={"lengths": [16, 64]})
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import nn

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses.classification.asl import ASL
from hashseek.training.losses.classification.bce import BCE
from hashseek.training.losses.classification.focal import Focal
from hashseek.training.losses.classification.hill import Hill
from hashseek.training.losses.classification.splc import SPLC
from hashseek.training.losses.classification.zlpr import ZLPR
from hashseek.training.losses.contrastive.base_proto import LBase, LProto
from hashseek.training.losses.contrastive.clml import CLML
from hashseek.training.losses.contrastive.hbl import HBL
from hashseek.training.losses.contrastive.msc import MSC
from hashseek.training.losses.contrastive.mulsupcon import MulSupCon
from hashseek.training.losses.contrastive.reg import Reg, SupConReg
from hashseek.training.losses.contrastive.simdis import SimDis
from hashseek.training.losses.contrastive.supcon import SupCon
from hashseek.training.losses.hashing.csq import CSQ
from hashseek.training.losses.hashing.dhn import DHN
from hashseek.training.losses.hashing.dpsh import DPSH
from hashseek.training.losses.hashing.dsh import DSH
from hashseek.training.losses.hashing.hashnet import HashNet
from hashseek.training.losses.hashing.hyp2 import HyP2
from hashseek.training.losses.hashing.idhn import IDHN
from hashseek.training.losses.hashing.nested import Nested
from hashseek.training.losses.hashing.orthohash import OrthoHash
from hashseek.training.losses.hashing.proxy_anchor import ProxyAnchor
from hashseek.training.losses.hashing.quantization import Quantized
from hashseek.training.losses.hashing.tie_aware import TieAware

LOSSES: dict[str, Callable[..., nn.Module]] = {
    "asl": ASL,
    "bce": BCE,
    "clml": CLML,
    "csq": CSQ,
    "dhn": DHN,
    "dpsh": DPSH,
    "dsh": DSH,
    "focal": Focal,
    "hashnet": HashNet,
    "hbl": HBL,
    "hill": Hill,
    "hyp2": HyP2,
    "hyp2_pair": partial(HyP2, parts="pair", beta=None),
    "hyp2_proxy": partial(HyP2, parts="proxy", beta=None),
    "hyp2_proxy_pair": partial(HyP2, parts="proxy+pair"),
    "idhn": IDHN,
    "l_base": LBase,
    "l_proto": LProto,
    "msc": MSC,
    "mulsupcon": MulSupCon,
    "orthohash": OrthoHash,
    "proxy_anchor": ProxyAnchor,
    "reg": Reg,
    "simdis": SimDis,
    "splc": SPLC,
    "supcon": SupCon,
    "supcon_all": partial(SupCon, positives="all"),
    "supcon_reg": SupConReg,
    "tie_aware": TieAware,
    "wo_reg": partial(Reg, penalty=False),
    "zlpr": ZLPR,
}

# Their memory holds outputs as they are and not normalised: inner products and distances depend on lengths.
RAW_MEMORY = ("dhn", "dpsh", "dsh", "hashnet", "idhn")

# These read one logit per label, so that there is no prefix of a code to lay them on.
CLASSIFICATION = ("asl", "bce", "focal", "hill", "splc", "zlpr")


def build_loss(
    name: str,
    *,
    n_classes: int,
    n_bits: int,
    quantization: Mapping[str, Any] | None = None,
    nested: Mapping[str, Any] | None = None,
    **hyper: Any,
) -> nn.Module:
    """Build the loss `name` for C = n_classes labels and K = n_bits outputs.

    Args:
        name: a key of `LOSSES`.
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        quantization: {"kind", "weight"} adds the term "quantization", see `Quantized`.
        nested: {"lengths", "weights"} lays the loss on prefixes of the code, see `Nested`; without "weights" each
            weighs 1. Hyperparameters that depend on K are taken for each length.
        hyper: hyperparameters of the loss, see `hyperparameters`.

    Raises:
        BadConfig: unknown loss, unknown hyperparameter, or a value outside its limits.
    """
    if name not in LOSSES:
        close = difflib.get_close_matches(str(name), LOSSES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(sorted(LOSSES))}"
        raise BadConfig(f"there is no loss {name!r}: {hint}")
    _check_keys(f"the loss {name!r}", hyper, [*hyperparameters(name), "quantization", "nested"])
    build = partial(LOSSES[name], n_classes=n_classes, **hyper)
    if nested is None:
        loss = build(n_bits=n_bits)
    else:
        if name in CLASSIFICATION:
            raise BadConfig(f"the loss {name!r} reads logits, which have no prefixes: leave nested out")
        _check_keys("nested", nested, ("lengths", "weights"), needed=("lengths",))
        loss = Nested(lambda length: build(n_bits=length), n_bits=n_bits, **nested)
    if quantization is None:
        return loss
    _check_keys("quantization", quantization, ("kind", "weight"), needed=("kind", "weight"))
    return Quantized(loss, **quantization)


def hyperparameters(name: str) -> dict[str, Any]:
    """Hyperparameters of the loss `name` with their defaults."""
    build = LOSSES[name]
    fixed = build.keywords if isinstance(build, partial) else {}
    parameters = inspect.signature(build).parameters
    return {key: p.default for key, p in parameters.items() if key not in ("n_classes", "n_bits", *fixed)}


def _check_keys(what: str, given: Mapping[str, Any], allowed: Collection[str], needed: Collection[str] = ()) -> None:
    if not isinstance(given, Mapping):
        raise BadConfig(f"{what} must be a table with the keys {', '.join(allowed)}, not {given!r}")
    for key in given:
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(allowed)}"
            raise BadConfig(f"{what} has no hyperparameter {key!r}: {hint}")
    for key in needed:
        if key not in given:
            raise BadConfig(f"{what} has no {key!r}: give {' and '.join(needed)}")
