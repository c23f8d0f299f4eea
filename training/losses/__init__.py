"""The losses, all behind one contract:

    loss = build_loss("tie_aware", n_classes=C, n_bits=K, weight=0.5)
    terms = loss(outputs, labels, epoch=epoch)      # outputs (B, K) float, labels (B, C) 0/1
    sum(terms.values()).backward()

A loss returns its weighted terms by name; their sum is what is minimised (`Loss.forward`). Proxies, prototypes and
centres are parameters or buffers of the module. To add a loss, write a subclass of `Loss` and give it a name in
`LOSSES`; a loss outside this package is named "my_module:MyLoss".

Any loss accepts a quantisation term, and any loss of the outputs can be applied to prefixes of the code:

    build_loss("hyp2", n_classes=C, n_bits=64, quantization={"kind": "l2", "weight": 0.1}, nested={"lengths": [16, 64]})
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hashseek.retrieval.errors import BadConfig, suggest
from hashseek.retrieval.plugins import load_named

if TYPE_CHECKING:
    from torch import nn

    from hashseek.training.losses.base import Loss

_PACKAGE = "hashseek.training.losses"

LOSSES: dict[str, str] = {
    name: f"{_PACKAGE}.{place}"
    for name, place in {
        "tie_aware": "hashing.tie_aware:TieAware",
        "hyp2": "hashing.hyp2:HyP2",
        "hyp2_proxy": "hashing.hyp2:HyP2Proxy",
        "hyp2_pair": "hashing.hyp2:HyP2Pair",
        "hyp2_proxy_pair": "hashing.hyp2:HyP2ProxyPair",
        "dsh": "hashing.dsh:DSH",
        "dpsh": "hashing.dpsh:DPSH",
        "dhn": "hashing.dhn:DHN",
        "hashnet": "hashing.hashnet:HashNet",
        "idhn": "hashing.idhn:IDHN",
        "csq": "hashing.csq:CSQ",
        "orthohash": "hashing.orthohash:OrthoHash",
        "proxy_anchor": "hashing.proxy_anchor:ProxyAnchor",
        "supcon": "contrastive.supcon:SupCon",
        "supcon_all": "contrastive.supcon:SupConAll",
        "mulsupcon": "contrastive.mulsupcon:MulSupCon",
        "l_base": "contrastive.base_proto:LBase",
        "l_proto": "contrastive.base_proto:LProto",
        "msc": "contrastive.msc:MSC",
        "wo_reg": "contrastive.reg:WithoutReg",
        "reg": "contrastive.reg:Reg",
        "supcon_reg": "contrastive.reg:SupConReg",
        "simdis": "contrastive.simdis:SimDis",
        "hbl": "contrastive.hbl:HBL",
        "clml": "contrastive.clml:CLML",
        "bce": "classification:BCE",
        "focal": "classification:Focal",
        "asl": "classification:ASL",
        "zlpr": "classification:ZLPR",
        "hill": "classification:Hill",
        "splc": "classification:SPLC",
        "bihalf": "unsupervised:BiHalf",
    }.items()
}
"""Every loss by name, as "module:Class". The order is that of `hashseek losses`."""


def check_name(name: str) -> None:
    """Raise `BadConfig` unless `name` is a key of `LOSSES`, or written as "module:Class"; does not load torch."""
    if name not in LOSSES and ":" not in str(name):
        hint = suggest(str(name), LOSSES)
        raise BadConfig(f'there is no loss {name!r}: {hint} (`hashseek losses` lists all; your own is "module:Class")')


def loss_class(name: str) -> "type[Loss]":
    """The class of the loss `name`: a key of `LOSSES`, or "module:Class" from anywhere.

    Raises:
        BadConfig: there is no such loss, or the class is not a subclass of `Loss`.
    """
    check_name(name)
    from hashseek.training.losses.base import Loss

    found = load_named(LOSSES.get(name, name), kind="loss")
    if not (isinstance(found, type) and issubclass(found, Loss)):
        raise BadConfig(f"{name!r} is not a loss: it must be a subclass of {Loss.__module__}.Loss")
    return found


def build_loss(
    name: str,
    *,
    n_classes: int,
    n_bits: int,
    quantization: Mapping[str, Any] | None = None,
    nested: Mapping[str, Any] | None = None,
    **hyper: Any,
) -> "nn.Module":
    """Build the loss `name` for C = n_classes labels and K = n_bits outputs.

    Args:
        name: a key of `LOSSES`, or "module:Class".
        n_classes: C, number of labels.
        n_bits: K, width of the outputs.
        quantization: {"kind", "weight"}, adds the term "quantization", see `Quantized`.
        nested: {"lengths", "weights"}, applies the loss to prefixes of the code, see `Nested`; without "weights", each
            weight is 1. Hyperparameters that depend on K are derived for each length.
        hyper: hyperparameters of the loss, see `Loss.hyperparameters`; "none" unsets one whose default is None.

    Raises:
        BadConfig: unknown loss, unknown hyperparameter, or a value outside its limits.
    """
    from hashseek.training.losses.hashing.nested import Nested
    from hashseek.training.losses.hashing.quantization import Quantized
    from hashseek.training.losses.hyperparameters import check_keys

    found = loss_class(name)
    known = found.hyperparameters()
    check_keys(f"the loss {name!r}", hyper, [*known, "quantization", "nested"])
    given = {key: value for key, value in hyper.items() if not known[key].is_unset_by(value)}
    build = partial(found, n_classes=n_classes, **given)
    loss: nn.Module
    if nested is None:
        loss = build(n_bits=n_bits)
    else:
        if found.kind == "classification":
            raise BadConfig(f"the loss {name!r} uses logits, which have no prefixes: leave nested out")
        check_keys("nested", nested, ("lengths", "weights"), needed=("lengths",))
        loss = Nested(lambda length: build(n_bits=length), n_bits=n_bits, **nested)
    if quantization is None:
        return loss
    check_keys("quantization", quantization, ("kind", "weight"), needed=("kind", "weight"))
    return Quantized(loss, **quantization)
