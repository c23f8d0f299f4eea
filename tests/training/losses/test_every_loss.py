"""What every loss must do, by name."""

import copy
import math
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses import LOSSES, build_loss, loss_class
from hashseek.training.losses.base import KINDS
from hashseek.training.losses.batches import check_batch
from hashseek.training.losses.hyperparameters import Choice, Flag, Number
from support.edge_batches import edge_batches
from support.literal_losses import CASES, batch, features_for, gradients_of, literal_gradients_of, total

# Batches as small as these leave half of HBL untrained, which it says.
pytestmark = pytest.mark.filterwarnings("ignore:HBL's margins need")

WRAPPED = ("hyp2", {"nested": {"lengths": [5, 6]}, "quantization": {"kind": "logcosh", "weight": 1}})
ALL = [*CASES, ("clml", {}), ("clml", {"floor": 0.0, "scale": "none", "count_empty": True}), WRAPPED]
CLASSIFICATION = [name for name in LOSSES if loss_class(name).kind == "classification"]
WITH_MEMORY = [name for name in LOSSES if loss_class(name).memory_kind != "none"]
UNSUPERVISED = [(name, {}) for name in LOSSES if loss_class(name).kind == "unsupervised"]
CONTRASTIVE = [name for name in LOSSES if loss_class(name).kind == "contrastive" and name != "clml"]
IGNORES_LENGTHS = [*CONTRASTIVE, "hyp2", "hyp2_proxy", "hyp2_pair", "hyp2_proxy_pair", "orthohash", "proxy_anchor"]

# Edge batches in which no two rows share a label.
NO_PAIR = (
    "one label in all",
    "no row with labels",
    "no valid pair",
    "one row",
    "one row without labels",
    "two rows, disjoint labels",
    "cosines of 1, no valid pair",
)
UNLABELLED = ("no row with labels", "one row without labels")
ZERO_WITHOUT_PAIRS = ("supcon", "supcon_all", "mulsupcon", "l_base", "simdis", "supcon_reg", "hbl")
ZERO_WITHOUT_LABELS = (*ZERO_WITHOUT_PAIRS, "l_proto", "msc", "reg", "wo_reg", "csq", "orthohash")


def width_of(name, n_classes=4):
    return n_classes if name in CLASSIFICATION else 6


def build(name, n_classes=4, **hyper):
    torch.manual_seed(0)
    return build_loss(name, n_classes=n_classes, n_bits=width_of(name, n_classes), **hyper)


def rows_for(name, seed, n=9, n_classes=4):
    return batch(seed, n=n, width=width_of(name, n_classes), n_classes=n_classes)


def memories_for(name, *memories):
    return [None, *memories] if name in WITH_MEMORY else [None]


def everything_for(name, hyper):
    """A loss and all that it may be given, in float32; HBL with its gate open."""
    outputs, labels = rows_for(name, 0, n=24)
    given = {"epoch": 2, **features_for(name, 24)}
    if name not in CLASSIFICATION:
        given["logits"] = rows_for("bce", 1, n=24)[0].float()
    if name in WITH_MEMORY:
        given["memory"] = tuple(part.float() for part in rows_for(name, 50, n=40))
    return (
        build(name, **{**hyper, **({"k_min": 2, "lam": 1.0} if name == "hbl" else {})}),
        outputs.float(),
        labels,
        given,
    )


def test_every_loss_has_a_literal_form():
    assert LOSSES.keys() - dict(CASES).keys() == {"clml", "bihalf"}, "add it to tests/support/literal_losses.py"


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_literal_form_in_value_and_gradient(name, options, seed):
    outputs, labels = rows_for(name, seed)
    if "empty_match" in options:
        labels[:3] = 0
    loss = build(name, **options).double()
    # A memory may have as many rows as the batch.
    for memory in memories_for(name, rows_for(name, seed + 10, n=14), rows_for(name, seed + 20, n=(2, 9, 5)[seed])):
        given = {"memory": memory, "epoch": 30 * seed}
        fast = gradients_of(loss, outputs, labels, **given)
        slow = literal_gradients_of(name, loss, outputs, labels, **given, **options)
        torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "options"), ALL, ids=str)
def test_order_of_rows_and_labels_and_length_of_rows(name, options):
    outputs, labels = rows_for(name, 0)
    loss = build(name, **options).double()
    generator = torch.Generator().manual_seed(0)
    shuffle, mix, columns = (torch.randperm(n, generator=generator) for n in (9, 15, 4))
    recoloured = copy.deepcopy(loss)
    per_label = {key: value[columns] for key, value in loss.state_dict().items() if value.shape[:1] == (4,)}
    recoloured.load_state_dict(per_label, strict=False)
    for memory in memories_for(name, rows_for(name, 50, n=15)):
        value, (gradient, *rest) = gradients_of(loss, outputs, labels, memory=memory, epoch=2)
        mixed = None if memory is None else tuple(part[mix] for part in memory)
        again = gradients_of(loss, outputs[shuffle], labels[shuffle], memory=mixed, epoch=2)
        torch.testing.assert_close(again, (value, [gradient[shuffle], *rest]))
        if name not in CLASSIFICATION:  # there a column is a label and an output
            swapped = None if memory is None else (memory[0], memory[1][:, columns])
            again, (same, *_) = gradients_of(recoloured, outputs, labels[:, columns], memory=swapped, epoch=2)
            torch.testing.assert_close((again, same), (value, gradient))
        if name in IGNORES_LENGTHS and "quantization" not in options:
            again, (scaled, *_) = gradients_of(loss, 3 * outputs, labels, memory=memory, epoch=2)
            torch.testing.assert_close((again, 3 * scaled), (value, gradient))


@pytest.mark.parametrize(
    ("name", "options", "dtype", "tau"),
    [
        *((*case, torch.float32, 0.001) for case in ALL),
        *((name, {}, torch.float64, None) for name in dict(ALL)),
        *((name, {}, torch.float16, 0.1) for name in dict(ALL)),  # raised to float32 in one place
    ],
    ids=str,
)
def test_survives_every_edge(name, options, dtype, tau):
    options = {**options, "tau": tau} if tau and name in CONTRASTIVE else options
    for n_classes in (1, 3):
        loss = build(name, n_classes, **options)
        for edge, (outputs, labels) in extreme_batches(width_of(name, n_classes), n_classes, dtype).items():
            kept = outputs.clone(), labels.clone()
            for which, memory in enumerate(memories_for(name, (outputs, labels), (outputs[:0], labels[:0]))):
                value, gradients = gradients_of(loss, outputs, labels, memory=memory, epoch=40)
                where = f"{edge}, C={n_classes}, memory {which}"
                assert all(bool(found.isfinite().all()) for found in (value, *gradients)), where
                nothing = name in ZERO_WITHOUT_PAIRS and edge in NO_PAIR and which != 1
                nothing |= name in ZERO_WITHOUT_LABELS and edge in UNLABELLED and which == 0
                if nothing and not options.get("empty_match"):
                    assert value == 0, where
                    assert not any(gradient.any() for gradient in gradients), where
            assert torch.equal(outputs, kept[0]), f"{edge}: outputs were changed"
            assert torch.equal(labels, kept[1]), f"{edge}: labels were changed"


def extreme_batches(width, n_classes, dtype):
    batches = edge_batches(width, n_classes, dtype)
    outputs, labels = batches["several labels"]
    batches["outputs of 800"] = (800 * outputs.sign(), labels)
    if dtype != torch.float16:  # which cannot hold their gradients
        batches["tiny outputs"] = (1e-6 * outputs, labels)
    batches["no rows"] = (outputs[:0], labels[:0])
    return batches


@pytest.mark.parametrize(("name", "options"), [*ALL, *UNSUPERVISED], ids=str)
def test_float32_stays_close_half_is_raised_and_autocast_changes_nothing(name, options):
    loss, outputs, labels, given = everything_for(name, options)
    for context in (given, {**given, "memory": None}):
        rough = gradients_of(loss, outputs, labels, **context)
        exact = gradients_of(copy.deepcopy(loss).double(), outputs.double(), labels, **context)
        torch.testing.assert_close(rough, as_float(exact), rtol=2e-4, atol=2e-4)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # backward too
            inside = gradients_of(loss, outputs, labels, **context)
            half = loss(outputs.bfloat16(), labels, **context)
        torch.testing.assert_close(inside, rough, rtol=0, atol=0)
        torch.testing.assert_close(half, loss(outputs.bfloat16().float(), labels, **context), rtol=0, atol=0)


def as_float(found):
    return found[0].float(), [gradient.float() for gradient in found[1]]


# The sizes of CLML's SVDs depend on the data.
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "clml"])
def test_compiles_without_a_graph_break(name):
    loss, outputs, labels, given = everything_for(name, {})
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(outputs, labels, **given), loss(outputs, labels, **given))
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["dpsh", "hbl", "hyp2", "msc", "reg", "supcon"])
def test_compiling_under_autocast_keeps_the_gradient(name):
    loss, outputs, labels, given = everything_for(name, {})
    exact = gradients_of(loss, outputs, labels, **given)
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, (gradient, *_) = gradients_of(compiled, outputs, labels, **given)
    torch.compiler.reset()
    torch.testing.assert_close((value, gradient), (exact[0], exact[1][0]))


@pytest.mark.parametrize("name", LOSSES)
def test_memory_layout_and_label_types_do_not_matter_and_nothing_is_changed(name):
    loss, outputs, labels, given = everything_for(name, {})
    expected = gradients_of(loss, outputs, labels, **given)

    def by_columns(rows):
        return rows.T.contiguous().T if isinstance(rows, torch.Tensor) else rows

    laid = {
        key: tuple(map(by_columns, value)) if key == "memory" else by_columns(value) for key, value in given.items()
    }
    kept = copy.deepcopy((outputs, labels, given))
    torch.testing.assert_close(gradients_of(loss, by_columns(outputs), by_columns(labels.float()), **laid), expected)
    for dtype in (torch.bool, torch.uint8, torch.float16):
        again = gradients_of(loss, outputs, labels.to(dtype), **given)
        torch.testing.assert_close(again, expected, rtol=0, atol=0)
    torch.testing.assert_close((outputs, labels, given), kept, rtol=0, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_training_lowers_the_loss_and_a_loaded_state_continues_it(name):
    loss, outputs, labels, given = everything_for(name, {})
    leaf = outputs.clone().requires_grad_()
    optimizer = torch.optim.SGD([leaf, *loss.parameters()], lr=1e-3)
    values = []
    for _ in range(10):
        optimizer.zero_grad()
        value = total(loss(leaf, labels, **given))
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < values[0]
    torch.manual_seed(1)
    other = build_loss(name, n_classes=4, n_bits=width_of(name), **({"k_min": 2, "lam": 1.0} if name == "hbl" else {}))
    other.load_state_dict(loss.state_dict())
    assert torch.equal(total(other(leaf, labels, **given)), total(loss(leaf, labels, **given)))


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_no_tensor_is_as_large_as_anchors_x_rows_x_labels(name):
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            largest = max([largest, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))])
            return result

    n, q, n_classes = 12, 40, 20
    outputs, labels = batch(0, n=n, width=6, n_classes=n_classes, density=0.2)
    memory = batch(1, n=q, width=6, n_classes=n_classes, density=0.2)
    loss = build(name, n_classes).double()
    with Watch():
        gradients_of(loss, outputs, labels, memory=memory)
    assert largest <= (n + n_classes) * (n + q + n_classes)


# Refusals


@pytest.mark.parametrize("name", LOSSES)
def test_bad_batches(name):
    loss, width = build(name), width_of(name)
    good, labels = torch.zeros(3, width), torch.zeros(3, 4)
    bad_labels = [
        torch.zeros(3, 5),
        torch.zeros(2, 4),
        torch.tensor([[0, 1, -1, 1]] * 3),
        torch.full((3, 4), 1 + 2**-23),
    ]
    bad_labels += [torch.full((3, 4), value) for value in (math.nan, math.inf)]
    for bad in bad_labels:
        with pytest.raises(BadCodes):
            loss(good, bad)
    with pytest.raises(BadCodes):
        loss(torch.zeros(3, width + 1), labels)
    for value in (math.nan, math.inf, -math.inf):
        outputs = good.clone()
        outputs[2, 1 % width] = value
        with pytest.raises(BadCodes, match="row 2"):
            loss(outputs, labels)


def test_finite_outputs_whose_sum_overflows_are_accepted():
    outputs = torch.full((3, 4), torch.finfo(torch.float32).max)
    assert torch.equal(check_batch(outputs, torch.zeros(3, 2), n_classes=2, n_bits=4)[0], outputs)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_a_memory_is_a_pair_or_has_attributes_and_gets_no_gradient(name):
    loss, outputs, labels, given = everything_for(name, {})

    class Rows:
        ref, ref_y = given["memory"][0].requires_grad_(), given["memory"][1]

    outputs.requires_grad_()
    pair, same = (total(loss(outputs, labels, memory=memory)) for memory in ((Rows.ref, Rows.ref_y.bool()), Rows()))
    assert torch.equal(pair, same)
    pair.backward()
    assert Rows.ref.grad is None
    for bad in (
        torch.zeros(3, 6),
        object(),
        (torch.zeros(3, 6),),
        (torch.zeros(3, 5), torch.zeros(3, 4)),
        (torch.zeros(3, 6), torch.full((3, 4), 0.5)),
        (torch.full((3, 6), torch.nan), torch.zeros(3, 4)),
        (torch.zeros(3, 6), torch.zeros(4, 4)),
    ):
        with pytest.raises(BadCodes, match="memory"):
            loss(outputs, labels, memory=bad)


# Hyperparameters: the declarations are what is checked

DECLARED = [(name, key) for name in LOSSES for key in loss_class(name).hyperparameters()]

# Values that are accepted only beside another one.
BESIDE = {
    ("supcon", "empty_match", True): {"positives": "all"},
    ("hbl", "reduction", "labels"): {"base": "mulsupcon"},
    ("hbl", "reduction", "sample"): {"base": "mulsupcon"},
}


@pytest.mark.parametrize(("name", "key"), DECLARED)
def test_what_is_declared_is_accepted_and_nothing_beyond(name, key):
    hyper = loss_class(name).hyperparameters()[key]
    inside, outside = values_of(hyper.limits)
    outside += [] if hyper.default is None else [None]
    assert hyper.limits.meaning
    for value in [hyper.default, *inside]:
        build_loss(name, n_classes=6, n_bits=16, **{key: value}, **BESIDE.get((name, key, value), {}))
    for value in outside:
        with pytest.raises(BadConfig, match=rf"\b{key}\b"):
            build_loss(name, n_classes=6, n_bits=16, **{key: value})


def values_of(limits):
    """Values of which all are allowed, and values of which none is."""
    if isinstance(limits, Flag):
        return [False, True], [0, 1, "yes"]
    if isinstance(limits, Choice):
        return list(limits.values), ["", "no such thing", 7, True]
    assert isinstance(limits, Number)
    step = 1 if limits.whole else 1e-6
    least = limits.least if limits.above is None else limits.above
    inside, outside = [], [math.nan, math.inf, -math.inf, "1", True, *([0.5] if limits.whole else [])]
    if least > -math.inf:
        inside += [least + step, *([least] if limits.above is None else [])]
        outside += [least - step, least - 1e6, *([] if limits.above is None else [least])]
    else:
        inside.append(-1e6)
    if limits.most < math.inf:
        inside.append(limits.most)
        outside += [limits.most + step, limits.most + 1e6]
    else:
        inside.append(10**6)
    return inside, outside


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_describes_itself(name):
    loss = loss_class(name)
    assert loss.kind in KINDS
    assert all([loss.source, loss.formula, loss.use, loss.__doc__])
    assert any("O(" in (part.__doc__ or "") for part in loss.__mro__)
    learned = ["proxies (learned)"] if "proxies" in dict(build(name).named_parameters()) else []
    learned += ["prototypes (learned)"] if "prototypes" in dict(build(name).named_parameters()) else []
    learned += ["centres (fixed)"] if "centres" in dict(build(name).named_buffers()) else []
    assert [need for need in loss.needs if need.endswith(("(learned)", "(fixed)"))] == learned


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_names_and_sizes(name):
    for key in (*loss_class(name).hyperparameters(), "quantization"):
        with pytest.raises(BadConfig, match=f"did you mean '{key}'"):
            build(name, **{f"{key}x": 1})
    too_few = -1 if loss_class(name).kind == "unsupervised" else 0
    for n_classes, n_bits in ((too_few, 4), (4, 0), (4, -1), (True, 4), (4.0, 4)):
        with pytest.raises(BadConfig):
            build_loss(name, n_classes=n_classes, n_bits=n_bits)


@pytest.mark.parametrize("name", ["hyp", "triplet_margin", "no_such_module:Loss", "pathlib:Path"])
def test_names_that_are_no_loss(name):
    with pytest.raises(BadConfig, match=name):
        build_loss(name, n_classes=3, n_bits=8)


def test_a_variant_fixes_hyperparameters():
    assert set(loss_class("hyp2_pair").hyperparameters()) == {"zeta", "offset"}
    assert set(loss_class("hyp2_proxy_pair").hyperparameters()) == {"beta", "zeta", "offset"}
    assert build("supcon_all").positives == "all"
    assert "penalty" not in loss_class("wo_reg").hyperparameters()
    with pytest.raises(BadConfig):
        build("hyp2_pair", parts="proxy")


PLUGIN = '''
from __future__ import annotations

from typing import Annotated

from hashseek.training.losses.base import Loss
from hashseek.training.losses.hyperparameters import Number


class Shrink(Loss):
    """Mean square of the outputs."""

    source = "none"
    formula = "none"
    use = "never"

    factor: Annotated[float, Number("weight of the term", above=0)] = 2.0

    def terms(self, batch):
        return {"shrink": self.factor * batch.outputs.square().mean()}


class OneOfEachRow(Shrink):
    def terms(self, batch):
        return {"shrink": batch.outputs.square().mean(dim=1)}
'''


def test_a_loss_from_outside_the_package(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    outputs, labels = batch(0)
    loss = build_loss("my_losses:Shrink", n_classes=4, n_bits=5, factor=3, nested={"lengths": [2, 5]})
    torch.testing.assert_close(loss(outputs, labels)["shrink@2"], 3 * outputs[:, :2].square().mean())
    for hyper in ({"factor": 0}, {"facto": 1}):
        with pytest.raises(BadConfig, match="facto"):
            build_loss("my_losses:Shrink", n_classes=4, n_bits=5, **hyper)
    with pytest.raises(BadConfig, match="OneOfEachRow"):
        build_loss("my_losses:OneOfEachRow", n_classes=4, n_bits=5)(outputs, labels)


def test_hbl_warns_once_that_a_small_batch_keeps_its_gate_shut():
    loss, (outputs, labels) = build("hbl"), rows_for("hbl", 0)
    with pytest.warns(UserWarning, match="k_min"):
        loss(outputs, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(outputs, labels)
        build("hbl")(outputs, labels, memory=rows_for("hbl", 1))
        build("hbl", k_min=8)(outputs, labels)
