"""Time and memory of the losses, forward and backward, as one Markdown table.

    make bench-losses          # or: python bench/losses.py [ROUNDS]

256 outputs of 64 numbers, 81 labels, a queue of 4,096 rows. Contrastive losses are compared with SupCon ANY on the same
queue, CLML with its decompositions, SupCon and Proxy Anchor with pytorch-metric-learning if installed
(`pip install pytorch-metric-learning`; Hashseek does not need it).

Times are CPU seconds of one thread, which are seconds on an idle machine and mostly independent of other load on a
shared one. Every round runs each case, so that a busy moment affects all of them; ratios are medians of the ratios
within a round. Memory is the memory allocated by torch's own allocator during one call, as recorded by the profiler:
the highest sum of allocations minus frees, so inputs, queue and module state do not count.
"""

import datetime
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hashseek.retrieval.devices import cpu_name
from hashseek.training.losses import LOSSES, build_loss, loss_class
from hashseek.training.losses.memory import KeyQueue

B, K, C, Q = 256, 64, 81, 4096
CLML_WIDTH = 2048  # of the features it was made for
MIB = 2**20
LEAST = 0.02  # seconds that a case runs in one round, so that the clock is fine enough

Case = Callable[[], object]


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returns."""

    numel: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):  # an expanded one has more elements than memory: that is no large tensor
                self.numel = max(self.numel, min(leaf.numel(), leaf.untyped_storage().nbytes() // leaf.element_size()))
        return result


# Batches


def long_tailed(n: int, generator: torch.Generator) -> Tensor:
    """Labels (n, C) about as NUS-WIDE's 81: the first on a third of the rows, 2.5 a row, 27 % of pairs share one."""
    shares = 0.38 / torch.arange(1, C + 1) ** 0.85
    return (torch.rand(n, C, generator=generator) < shares).float()


def even(n: int, generator: torch.Generator) -> Tensor:
    """Labels (n, C): 2.5 a row, all equally frequent."""
    return (torch.rand(n, C, generator=generator) < 2.5 / C).float()


def one_hot(n: int, generator: torch.Generator) -> Tensor:
    return nn.functional.one_hot(torch.randint(0, C, (n,), generator=generator), C).float()


def filled_queue(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    queue = KeyQueue(n_classes=C, n_bits=K, size=len(labels))
    queue.enqueue(torch.randn(len(labels), K, generator=generator), labels)
    return queue.memory()


def positives(labels: Tensor, memory: tuple[Tensor, Tensor]) -> int:
    return round(float((labels @ memory[1].float().T > 0).sum(dim=1).float().mean()))


# Cases: calls that do one forward and backward pass


def forward_and_backward(values: Callable[[], list[Tensor]], *leaves: Tensor) -> list[Tensor]:
    for leaf in leaves:
        leaf.grad = None
    found = values()
    torch.autograd.backward(found)
    return [value.detach() for value in found]


def case(loss: nn.Module, outputs: Tensor, labels: Tensor, *, logits: Tensor | None = None, **given: Any) -> Case:
    leaf = outputs.clone().requires_grad_()
    scores = None if logits is None else logits.clone().requires_grad_()
    return partial(
        forward_and_backward,
        lambda: list(loss(leaf, labels, logits=scores, **given).values()),
        leaf,
        *([] if scores is None else [scores]),
        *loss.parameters(),
    )


def those_of_pml(generator: torch.Generator) -> dict[str, tuple[Case, Case]]:
    """(ours, theirs) on one label a row, by name; they must agree in value."""
    try:
        from pytorch_metric_learning.losses import ProxyAnchorLoss, SupConLoss
    except ImportError:
        return {}
    outputs, labels, rows_y = torch.randn(B, K, generator=generator), one_hot(B, generator), one_hot(Q, generator)
    memory = filled_queue(rows_y, generator)
    ids, row_ids = labels.argmax(dim=1), memory[1].argmax(dim=1)
    supcon, anchor = build("supcon"), build("proxy_anchor")
    theirs = ProxyAnchorLoss(num_classes=C, embedding_size=K, margin=0.1, alpha=32)
    theirs.proxies.data.copy_(anchor.proxies.data)
    contrast = SupConLoss(temperature=0.1)

    def other(loss: nn.Module, **given: Any) -> Case:
        leaf = outputs.clone().requires_grad_()
        return partial(forward_and_backward, lambda: [loss(leaf, ids, **given)], leaf, *loss.parameters())

    pairs = {
        "supcon, queue": (
            case(supcon, outputs, labels, memory=memory),
            other(contrast, ref_emb=memory[0], ref_labels=row_ids),
        ),
        "supcon, batch": (case(supcon, outputs, labels), other(contrast)),
        "proxy_anchor": (case(anchor, outputs, labels), other(theirs)),
    }
    for mine, yours in pairs.values():
        torch.testing.assert_close(sum(mine()), sum(yours()), rtol=1e-4, atol=1e-4)
    return pairs


def build(name: str, n_bits: int = K, **hyper: Any) -> nn.Module:
    torch.manual_seed(0)
    return build_loss(name, n_classes=C, n_bits=n_bits, **hyper)


# Measures


def seconds(cases: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call, for every case in every round."""
    repeats = {}
    for name, call in cases.items():
        call()
        repeats[name], started = 0, time.process_time()
        while time.process_time() - started < LEAST:  # one call would be a slow one: nothing is in the caches yet
            call()
            repeats[name] += 1
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, call in cases.items():
            started = time.process_time()
            for _ in range(repeats[name]):
                call()
            taken[name].append((time.process_time() - started) / repeats[name])
    return taken


def peak_bytes(call: Case) -> int:
    """The most that torch's allocator had handed out at once during the call."""
    with muted(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    now = peak = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak


@contextmanager
def muted() -> Iterator[None]:
    """Discard standard error, where the profiler's C++ code reports that it starts and stops."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def largest_tensor(call: Case) -> int:
    with Largest() as seen:
        call()
    return seen.numel


def decompositions(call: Case, rounds: int) -> tuple[float, float]:
    """Median seconds of a call of CLML, and of the decompositions in it."""
    spent = 0.0

    def timed(decompose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        started = time.process_time()
        result = decompose(*args, **kwargs)
        spent += time.process_time() - started
        return result

    taken = []
    call()
    with (
        mock.patch.object(torch.linalg, "svd", partial(timed, torch.linalg.svd)),
        mock.patch.object(torch.linalg, "qr", partial(timed, torch.linalg.qr)),
    ):
        for _ in range(rounds):
            started, spent = time.process_time(), 0.0
            call()
            taken.append((time.process_time() - started, spent))
    return median(total for total, _ in taken), median(part for _, part in taken)


def ratio(upper: list[float], lower: list[float]) -> float:
    return median(a / b for a, b in zip(upper, lower, strict=True))


# Report


def machine() -> str:
    load = os.getloadavg()[0]
    return (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {cpu_name()}, {os.cpu_count()} cores, load {load:.1f}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    outputs, labels = torch.randn(B, K, generator=generator), long_tailed(B, generator)
    logits = torch.randn(B, C, generator=generator) + 4 * labels - 3
    memory = filled_queue(long_tailed(Q, generator), generator)
    rare = even(B, generator), filled_queue(even(Q, generator), generator)

    cases, queued = {}, {}
    for name in LOSSES:
        if loss_class(name).memory_kind == "normalized":
            queued[name] = case(build(name), outputs, labels, memory=memory)
        else:
            given: dict[str, Any] = {"logits": logits, "epoch": 1}
            if loss_class(name).reads_features:
                given["features"] = torch.randn(B, CLML_WIDTH, generator=generator)
            cases[name] = case(build(name), outputs, labels, **given)
    queued["hbl, base mulsupcon"] = case(build("hbl", base="mulsupcon"), outputs, labels, memory=memory)
    queued["hbl, labels equally frequent"] = case(build("hbl"), outputs, rare[0], memory=rare[1])
    queued["simdis, mode outside"] = case(build("simdis", mode="outside"), outputs, labels, memory=memory)
    queued["reg, alpha 1"] = case(build("reg", alpha=1.0), outputs, labels, memory=memory)
    beside = {}
    pml = those_of_pml(generator)
    for name, (mine, yours) in pml.items():
        beside |= {f"ours {name}": mine, f"theirs {name}": yours}

    print(
        f"B = {B}, K = {K}, C = {C}, queue {Q}; {labels.sum(dim=1).mean():.1f} labels a row; positives of an anchor in "
        f"the queue: {positives(labels, memory)},\nwith equally frequent labels {positives(*rare)}. Forward and "
        f"backward in float32, CPU time of one thread, median of {rounds} rounds.\n{machine()}.\n"
    )
    taken = seconds(cases | queued | beside, rounds)
    ratios = {name: ratio(taken[name], taken["supcon"]) for name in queued}
    print("| loss | compared with | ms | x SupCon ANY, queue | peak MiB | largest tensor, x B Q |")
    print("|---|---|---:|---:|---:|---:|")
    for name, call in sorted((cases | queued).items(), key=lambda item: list(LOSSES).index(item[0].partition(",")[0])):
        peak, largest = peak_bytes(call), largest_tensor(call)
        if largest >= B * Q * C or peak >= B * Q * C:  # a byte an element: no such tensor of any type
            raise AssertionError(f"{name} makes {largest} elements at once or holds {peak} bytes; B Q C is {B * Q * C}")
        print(
            f"| {name} | {'queue' if name in queued else 'batch'} | {1e3 * median(taken[name]):.2f} | "
            f"{f'{ratios[name]:.2f}' if name in ratios else ''} | {peak / MIB:.1f} | {largest / (B * Q):.2f} |"
        )
    print()

    print(f"- No tensor of B Q C = {B * Q * C:,} elements, nor as many bytes held at once, in any loss: checked.")
    for width in (K, CLML_WIDTH):
        call = case(build("clml", width), torch.randn(B, width, generator=generator), labels, logits=logits, epoch=1)
        total, part = decompositions(call, rounds)
        whole, rest = (value / median(taken["supcon"]) for value in (total, total - part))
        print(
            f"- CLML on features of {width}: {1e3 * total:.1f} ms ({whole:.2f} x SupCon ANY), of which SVD and QR "
            f"{1e3 * part:.1f} and the rest {1e3 * (total - part):.1f} ({rest:.2f} x); "
            f"peak {peak_bytes(call) / MIB:.1f} MiB."
        )
    for name in pml:
        value = ratio(taken[f"ours {name}"], taken[f"theirs {name}"])
        print(
            f"- {name}, one label a row, beside pytorch-metric-learning: {1e3 * median(taken[f'ours {name}']):.2f} ms "
            f"to {1e3 * median(taken[f'theirs {name}']):.2f}, {value:.2f} x."
        )
    if not pml:
        print("- pytorch-metric-learning is not installed: not compared.")


if __name__ == "__main__":
    main()
