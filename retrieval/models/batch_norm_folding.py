"""Folds batch norm into the convolution before it, which saves a pass over the activations; the encoder uses it."""

import threading
import warnings
from collections import Counter
from copy import deepcopy
from typing import Any

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

Pair = tuple[str, str]

# Tracing replaces `nn.Module.__call__` for the whole process, so only one thread may trace at once. Calls of other
# threads are passed through.
_TRACING = threading.Lock()


class _Tracer(fx.Tracer):
    """Treats batch norm, also timm's with its activation, as one module."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call another thread's network, which runs during the trace, as usual."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.BatchNorm2d) or super().is_leaf_module(m, module_qualified_name)


def conv_norm_pairs(network: nn.Module) -> list[Pair]:
    """Names of each convolution whose output only a batch norm reads, with that batch norm's name.

    Modules that are called more than once are left out. The list is empty if the network cannot be traced.
    """
    try:
        with _TRACING, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer looks at all names in torch, including deprecated ones
            graph = _Tracer().trace(network)
    except Exception:  # control flow that depends on the input may raise anything
        return []
    modules = dict(network.named_modules())
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    pairs = []
    for node in graph.nodes:
        if node.op != "call_module" or type(modules[node.target]) is not nn.Conv2d or len(node.users) != 1:
            continue
        reader = next(iter(node.users))
        if reader.op != "call_module" or calls[node.target] != 1 or calls[reader.target] != 1:
            continue
        norm = modules[reader.target]
        if isinstance(norm, nn.BatchNorm2d) and norm.track_running_stats and _after(norm) is not None:
            pairs.append((node.target, reader.target))
    return pairs


def fold(network: nn.Module) -> tuple[nn.Module, int]:
    """A copy of `network` (in evaluation mode) with batch norm folded, and the number of folded ones.

    In float32 the outputs agree to rounding (about 1e-6 relative).
    """
    folded = deepcopy(network).eval()
    pairs = conv_norm_pairs(folded)
    for conv_name, norm_name in pairs:
        conv, norm = folded.get_submodule(conv_name), folded.get_submodule(norm_name)
        after = _after(norm)
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)
        assert after is not None
        folded.set_submodule(conv_name, fuse_conv_bn_eval(conv, norm))
        folded.set_submodule(norm_name, after)
    return folded, len(pairs)


def _after(norm: nn.Module) -> nn.Module | None:
    """What replaces a folded batch norm; None if its kind is not supported."""
    if type(norm) is nn.BatchNorm2d:
        return nn.Identity()
    if type(norm).__name__ == "BatchNormAct2d":  # timm's: dropout and activation are in it
        return nn.Sequential(norm.drop, norm.act)  # type: ignore[arg-type]
    return None
