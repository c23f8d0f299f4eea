"""The contract that every loss of `LOSSES` keeps, whatever it computes."""

import copy
import inspect

import pytest
import torch
from torch import nn

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses import CLASSIFICATION, LOSSES, build_loss, hyperparameters
from hashseek.training.losses.catalogue import facts
from hashseek.training.losses.common import check_batch
from support.edge_batches import edge_batches
from support.literal_losses import batch, gradients_of, total

# Says that batches as small as these leave half of it untrained.
pytestmark = pytest.mark.filterwarnings("ignore:HBL's margins need")

# Every name with its defaults, and the options that take another path through the code.
CASES = [
    *((name, {}) for name in LOSSES),
    ("asl", {"m": 0, "gamma_neg": 0.5, "reduction": "sum"}),
    ("csq", {"centres": "balanced", "lam": 0.05}),
    ("dhn", {"normed": True, "balance": True, "quantizer": "square"}),
    ("dhn", {"clip": 15, "inner": 1.0, "quantizer": "cos"}),
    ("dsh", {"dense": True}),
    ("focal", {"detach_weight": True, "gamma": 0.5}),
    ("hashnet", {"jaccard": True, "class_num": 4, "continuation": "none"}),
    ("hyp2", {"zeta": -1, "offset": 0}),
    ("hyp2", {"nested": {"lengths": [5, 6]}, "quantization": {"kind": "logcosh", "weight": 1}}),
    ("orthohash", {"margin": "arc"}),
    ("orthohash", {"bce": True}),
    ("proxy_anchor", {"alpha": 200.0}),
    ("splc", {"margin_on_corrected": True, "start_epoch": 0}),
    ("zlpr", {"reduction": "sum"}),
]
PAIRWISE = ("dhn", "dpsh", "dsh", "hashnet", "idhn")
UNLABELLED_COUNT_NOTHING = ("csq", "orthohash")


def build(name, n_classes=4, n_bits=6, **hyper):
    torch.manual_seed(0)
    return build_loss(name, n_classes=n_classes, n_bits=n_classes if name in CLASSIFICATION else n_bits, **hyper)


def rows_for(name, seed, n=9, n_classes=4):
    return batch(seed, n=n, width=n_classes if name in CLASSIFICATION else 6, n_classes=n_classes)


@pytest.mark.parametrize("name", LOSSES)
def test_terms_are_named_scalars_and_training_lowers_their_sum(name):
    outputs, labels = rows_for(name, 0)
    loss = build(name).double()
    leaf = outputs.clone().requires_grad_()
    optimizer = torch.optim.SGD([leaf, *loss.parameters()], lr=1e-3)
    values = []
    for _ in range(20):
        terms = loss(leaf, labels, memory=None, logits=None, epoch=0)
        assert all(isinstance(term, str) and value.ndim == 0 for term, value in terms.items())
        optimizer.zero_grad()
        total(terms).backward()
        optimizer.step()
        values.append(total(terms).item())
    assert values[-1] < values[0]


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_survives_every_edge(name, hyper, dtype):
    for n_classes in (1, 3, 8):
        if n_classes == 8 and "nested" in hyper:
            continue
        loss = build(name, n_classes, **hyper)
        width = n_classes if name in CLASSIFICATION else 6
        for edge, (outputs, labels) in edge_batches(width, n_classes, dtype).items():
            kept, kept_labels = outputs.clone(), labels.clone()
            memories = [None, (outputs, labels), (outputs[:0], labels[:0])] if name in PAIRWISE else [None]
            for memory in memories:
                for epoch in (0, 40):
                    where = f"{edge}, C={n_classes}, memory {memory}, epoch {epoch}"
                    value, gradients = gradients_of(loss, outputs, labels, memory=memory, epoch=epoch)
                    assert bool(value.isfinite()), where
                    assert all(bool(g.isfinite().all()) for g in gradients), where
                    if name in UNLABELLED_COUNT_NOTHING and not labels.any():
                        assert value == 0, where
                        assert not any(g.any() for g in gradients), where
            assert torch.equal(outputs, kept), f"{edge}: outputs were changed"
            assert torch.equal(labels, kept_labels), f"{edge}: labels were changed"


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=str)
def test_an_empty_batch_is_0(name, hyper):
    loss = build(name, **hyper)
    value, gradients = gradients_of(loss, torch.zeros(0, 4 if name in CLASSIFICATION else 6), torch.zeros(0, 4))
    assert value == 0
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=str)
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_outputs_of_plus_and_minus_800(name, hyper, size):
    generator = torch.Generator().manual_seed(1)
    width = 4 if name in CLASSIFICATION else 6
    outputs = 800 * torch.randint(0, 2, (6, width), generator=generator).mul(2).sub(1) * size / 300
    labels = (torch.rand(6, 4, generator=generator) < 0.5).float()
    for sign in (1, -1):
        value, gradients = gradients_of(build(name, **hyper), sign * outputs, labels, epoch=3)
        assert value.isfinite()
        assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_float32_stays_close_and_half_is_raised(name, hyper, seed):
    outputs, labels = rows_for(name, seed, n=16)
    loss = build(name, **hyper)
    memories = [None, rows_for(name, seed + 50, n=20)] if name in PAIRWISE else [None]
    for memory in memories:
        exact = gradients_of(copy.deepcopy(loss).double(), outputs, labels, memory=memory)
        rough = gradients_of(loss, outputs.float(), labels, memory=memory)
        assert rough[0].dtype == torch.float32
        torch.testing.assert_close(rough[0].double(), exact[0], rtol=2e-4, atol=2e-4)
        for a, b in zip(rough[1], exact[1], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-4)
        half = outputs.bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = loss(half, labels, memory=memory)
        outside = loss(half.float(), labels, memory=memory)
        for term, value in inside.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, outside[term]), term


# Where backward runs, or is traced, under autocast.


def everything_for(name, hyper):
    """A loss and all that it may be given; to a classification loss the outputs are logits."""
    outputs, labels = rows_for(name, 0, n=24)
    logits = None if name in CLASSIFICATION else rows_for("bce", 1, n=24)[0].float()
    given = {"logits": logits, "epoch": 2}
    if facts(name).memory:
        given["memory"] = rows_for(name, 50, n=40)
    hyper = {**hyper, "k_min": 2, "lam": 1.0} if name == "hbl" else hyper
    return build(name, **hyper), outputs.float(), labels, given


@pytest.mark.parametrize(("name", "hyper"), [*CASES, ("hbl", {"base": "mulsupcon"}), ("reg", {"alpha": 1.0})], ids=str)
def test_autocast_changes_neither_value_nor_gradient(name, hyper):
    loss, outputs, labels, given = everything_for(name, hyper)
    for context in (given, {**given, "memory": None}):
        exact = gradients_of(loss, outputs, labels, **context)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = gradients_of(loss, outputs, labels, **context)
        for a, b in zip([inside[0], *inside[1]], [exact[0], *exact[1]], strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["dpsh", "hbl", "hyp2", "msc", "reg", "supcon"])
def test_nor_does_compiling_under_autocast(name):
    loss, outputs, labels, given = everything_for(name, {})
    exact = gradients_of(loss, outputs, labels, **given)
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, (gradient, *_) = gradients_of(compiled, outputs, labels, **given)
    torch.compiler.reset()
    torch.testing.assert_close(value, exact[0])
    torch.testing.assert_close(gradient, exact[1][0])


def by_columns(rows):
    return rows.T.contiguous().T


def between_others(rows):
    return torch.cat([rows, rows], dim=1)[:, : rows.shape[1]]


@pytest.mark.parametrize("layout", [by_columns, between_others])
@pytest.mark.parametrize("name", LOSSES)
def test_how_tensors_lie_in_memory_does_not_matter(name, layout):
    loss, outputs, labels, given = everything_for(name, {})
    loss = loss.double()
    given = {key: value.double() if key == "logits" and value is not None else value for key, value in given.items()}
    expected = gradients_of(loss, outputs.double(), labels, **given)
    laid = {
        key: tuple(map(layout, value))
        if key == "memory"
        else layout(value)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in given.items()
    }
    leaf = layout(outputs.double()).detach().requires_grad_()
    value = total(loss(leaf, layout(labels), **laid))
    found = value.detach(), list(torch.autograd.grad(value, [leaf, *loss.parameters()]))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_that_is_given_is_changed(name):
    loss, outputs, labels, given = everything_for(name, {})
    labels = labels.float()  # the type that a loss computes in, so that it need not make a copy
    if "memory" in given:
        given["memory"] = tuple(part.float() for part in given["memory"])
    kept = copy.deepcopy((outputs, labels, given))
    gradients_of(loss, outputs, labels, **given)
    for now, before in zip((outputs, labels), kept, strict=False):
        assert torch.equal(now, before)
    if name not in CLASSIFICATION:
        assert torch.equal(given["logits"], kept[2]["logits"])
    for now, before in zip(given.get("memory", ()), kept[2].get("memory", ()), strict=True):
        assert torch.equal(now, before)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n_classes", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_extremes_come_out_finite(name, n, n_classes):
    width = n_classes if name in CLASSIFICATION else 6
    options = {"k_min": 1, "lam": 1.0} if name == "hbl" else {"zeta": -1} if name.startswith("hyp2") else {}
    if facts(name).method.__module__ != "hashseek.training.losses.classification.splc" and "tau" in hyperparameters(
        name
    ):
        options["tau"] = 0.001
    loss = build(name, n_classes, **options)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(n, width, generator=generator)
    poles = rows[:1] * torch.randint(0, 2, (n, 1), generator=generator).mul(2).sub(1)  # cosines of exactly -1 and 1
    logits = None if name in CLASSIFICATION else 800 * torch.randn(n, n_classes, generator=generator).sign()
    for outputs in (800 * rows.sign(), 1e4 * rows, 1e-6 * rows, 0 * rows, poles, rows[[0] * n]):
        for share in (0.0, 0.5, 1.0):
            labels = (torch.rand(n, n_classes, generator=generator) < share).float()
            memories = [None, (outputs[:1], labels[:1]), (outputs.flip(0), labels)] if facts(name).memory else [None]
            for memory in memories:
                value, gradients = gradients_of(loss, outputs, labels, memory=memory, logits=logits, epoch=30)
                assert value.isfinite()
                assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_order_of_rows_does_not_matter(name, hyper, seed):
    outputs, labels = rows_for(name, seed)
    loss = build(name, **hyper).double()
    shuffle = torch.randperm(len(outputs), generator=torch.Generator().manual_seed(seed))
    for memory in [None, rows_for(name, seed + 50, n=14)] if name in PAIRWISE else [None]:
        mixed = None if memory is None else tuple(part.flip(0) for part in memory)
        value, (gradient, *rest) = gradients_of(loss, outputs, labels, memory=memory, epoch=2)
        again, (moved, *same) = gradients_of(loss, outputs[shuffle], labels[shuffle], memory=mixed, epoch=2)
        torch.testing.assert_close(again, value)
        torch.testing.assert_close(moved, gradient[shuffle])
        for a, b in zip(same, rest, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", LOSSES)
def test_labels_of_any_type_are_the_same(name):
    outputs, labels = rows_for(name, 0)
    loss = build(name)
    value = total(loss(outputs, labels))
    for dtype in (torch.bool, torch.uint8, torch.long, torch.float16):
        assert torch.equal(total(loss(outputs, labels.to(dtype))), value)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loaded_state_gives_the_same_loss(name):
    outputs, labels = rows_for(name, 0)
    loss = build(name)
    torch.manual_seed(1)
    other = build_loss(name, n_classes=4, n_bits=4 if name in CLASSIFICATION else 6)
    other.load_state_dict(loss.state_dict())
    assert torch.equal(total(other(outputs, labels)), total(loss(outputs, labels)))


@pytest.mark.parametrize("name", LOSSES)
def test_bad_batches(name):
    loss = build(name)
    width = 4 if name in CLASSIFICATION else 6
    good = torch.zeros(3, width)
    with pytest.raises(BadCodes, match=rf"of shape \(B, {width}\), not \(3, {width + 1}\)"):
        loss(torch.zeros(3, width + 1), torch.zeros(3, 4))
    with pytest.raises(BadCodes, match=r"labels of shape \(3, 4\), not \(3, 5\)"):
        loss(good, torch.zeros(3, 5))
    with pytest.raises(BadCodes, match=r"labels must be 0 or 1, but one is -1"):
        loss(good, torch.tensor([[0, 1, -1, 1]] * 3))
    with pytest.raises(BadCodes, match=r"labels must be 0 or 1, but one is nan"):
        loss(good, torch.full((3, 4), torch.nan))
    with pytest.raises(BadCodes, match=r"labels must be 0 or 1, but one is inf"):
        loss(good, torch.full((3, 4), torch.inf))
    for value in (torch.nan, torch.inf, -torch.inf):
        bad = good.clone()
        bad[2, 1] = value
        with pytest.raises(BadCodes, match=r"NaN or inf.*row 2"):
            loss(bad, torch.zeros(3, 4))


def test_finite_outputs_whose_sum_overflows_are_no_flaw():
    outputs = torch.full((3, 4), torch.finfo(torch.float32).max)
    checked, _ = check_batch(outputs, torch.zeros(3, 2), n_classes=2, n_bits=4)
    assert torch.equal(checked, outputs)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_takes_sizes_and_flat_keywords_and_documents_them(name):
    assert all(default is not inspect.Parameter.empty for default in hyperparameters(name).values())
    assert not {"n_classes", "n_bits", "self"} & set(hyperparameters(name))
    loss = build(name, **hyperparameters(name))
    assert isinstance(loss, nn.Module)
    for word in ("Args:", "n_classes: C", "n_bits:", "Raises:", "O(", *(f"{key}:" for key in hyperparameters(name))):
        assert word in type(loss).__doc__, word
    assert "Raises:" in type(loss).forward.__doc__
    for n_classes, n_bits in ((0, 4), (4, 0), (4, -1), (True, 4), (4.0, 4)):
        with pytest.raises(BadConfig, match="must be a whole number of at least 1"):
            build_loss(name, n_classes=n_classes, n_bits=n_bits)


@pytest.mark.parametrize("name", LOSSES)
def test_misspelt_hyperparameters(name):
    for key in hyperparameters(name):
        with pytest.raises(BadConfig, match=rf"the loss '{name}' has no hyperparameter '{key}x': did you mean"):
            build(name, **{f"{key}x": 1})
    with pytest.raises(BadConfig, match="did you mean 'quantization'"):
        build(name, quantisation={"kind": "l1", "weight": 1})
    with pytest.raises(BadConfig, match=r"has no hyperparameter 'zzz': it has .*quantization, nested"):
        build(name, zzz=1)


def test_misspelt_names():
    with pytest.raises(BadConfig, match="there is no loss 'hyp': did you mean 'hyp2"):
        build_loss("hyp", n_classes=3, n_bits=8)
    with pytest.raises(BadConfig, match="there is no loss 'triplet_margin': choose one of asl, bce"):
        build_loss("triplet_margin", n_classes=3, n_bits=8)


def test_hyperparameters_tells_the_defaults():
    assert hyperparameters("dpsh") == {"eta": 0.1}
    assert hyperparameters("hyp2")["parts"] == "proxy+irrelevant"
    assert set(hyperparameters("hyp2_pair")) == set(hyperparameters("hyp2_proxy")) == {"zeta", "offset"}
    assert set(hyperparameters("hyp2_proxy_pair")) == {"beta", "zeta", "offset"}
    with pytest.raises(BadConfig, match="has no hyperparameter 'parts'"):
        build("hyp2_pair", parts="proxy")


def test_a_missing_tensor_of_the_memory_is_named():
    class Half:
        ref = torch.zeros(2, 6)

    with pytest.raises(BadCodes, match="the memory is a Half, but must hold tensors ref"):
        build("dpsh")(torch.zeros(3, 6), torch.zeros(3, 4), memory=Half())


@pytest.mark.parametrize("name", PAIRWISE)
def test_a_memory_may_be_a_pair_or_have_attributes(name):
    outputs, labels = rows_for(name, 0)

    class Rows:
        ref, ref_y = rows_for(name, 9, n=12)

    loss = build(name)
    as_object = loss(outputs, labels, memory=Rows())
    as_pair = loss(outputs, labels, memory=(Rows.ref, Rows.ref_y.bool()))
    assert torch.equal(total(as_object), total(as_pair))
