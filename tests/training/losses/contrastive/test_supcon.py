import math
from functools import partial

import _literal as literal
import pytest
import torch
import torch.nn.functional as F

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses.contrastive.supcon import SupCon
from support.literal_losses import batch, gradients_of

OPTIONS = [
    {},
    {"positives": "all"},
    {"positives": "all", "empty_match": True},
    {"tau": 0.5, "reduction": "batch"},
    {"reduction": "sum"},
    {"base_temperature": 0.07},
    {"positives": "all", "reduction": "batch", "base_temperature": 0.07, "tau": 0.07},
]


def build(n_classes=4, n_bits=5, **hyper):
    return SupCon(n_classes=n_classes, n_bits=n_bits, **hyper)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_loops_in_value_and_gradient(options, seed):
    outputs, labels = batch(seed)
    if "empty_match" in options:
        labels[:3] = 0
    for memory in (None, batch(seed + 10, n=12)):
        literal.assert_same(
            build(**options),
            partial(literal.supcon, labels=labels, memory=memory, **options),
            outputs,
            labels,
            memory,
        )


def test_three_rows_worked_by_hand():
    outputs = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 0], [1, 1], [0, 1]])
    a = math.log(1 + math.exp(-1))
    value = build(2, 2, tau=1.0)(outputs, labels)["supcon"]
    assert value.item() == pytest.approx((a + (a + 0.5) + math.log(2)) / 3, abs=1e-12)
    assert build(2, 2, tau=1.0, positives="all")(outputs, labels)["supcon"] == 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(options):
    outputs, labels = batch(1)
    loss = build(**{**options, "tau": 0.5})
    assert torch.autograd.gradcheck(lambda z: loss(z, labels)["supcon"], outputs.requires_grad_())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_order_and_length_do_not_matter(options):
    literal.assert_invariant(partial(build, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_survives_every_edge(options):
    options = {k: v for k, v in options.items() if k != "tau"}
    # Rows without labels are a pair on request.
    zero = tuple(n for n in literal.NO_PAIR if not options.get("empty_match") or n == "one row")
    after = () if options.get("empty_match") else literal.UNLABELLED
    literal.assert_survives_edges(partial(build, **options), zero=zero, zero_with_memory=after)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_float32_and_half(options):
    literal.assert_low_precision_agrees(partial(build, **options))


def test_makes_no_tensor_over_labels():
    literal.assert_no_tensor_over_labels(build)


@pytest.mark.parametrize("positives", ["any", "all"])
def test_memory_twice_over_only_adds_log_2(positives):
    outputs, labels = batch(0)
    ref, ref_y = batch(7, n=12)
    once = gradients_of(build(positives=positives), outputs, labels, memory=(ref, ref_y))
    twice = gradients_of(build(positives=positives), outputs, labels, memory=(ref.repeat(2, 1), ref_y.repeat(2, 1)))
    torch.testing.assert_close(twice[0], once[0] + math.log(2))
    torch.testing.assert_close(twice[1][0], once[1][0])


def test_anchors_twice_over_do_not_change_the_mean_over_a_memory():
    outputs, labels = batch(0)
    memory = batch(7, n=12)
    once = build()(outputs, labels, memory=memory)["supcon"]
    torch.testing.assert_close(build()(outputs.repeat(2, 1), labels.repeat(2, 1), memory=memory)["supcon"], once)


def test_single_labels_give_the_usual_supcon_for_both_kinds_of_positives():
    outputs, _ = batch(0, n=8)
    labels = F.one_hot(torch.tensor([0, 1, 2, 0, 1, 2, 0, 3]), 4)
    assert torch.equal(
        build(positives="any")(outputs, labels)["supcon"], build(positives="all")(outputs, labels)["supcon"]
    )


def test_batch_reduction_counts_anchors_without_positives_as_0():
    outputs, _ = batch(0, n=8)
    labels = F.one_hot(torch.tensor([0, 1, 2, 0, 1, 2, 0, 3]), 4)
    valid, by_batch = build()(outputs, labels)["supcon"], build(reduction="batch")(outputs, labels)["supcon"]
    torch.testing.assert_close(by_batch, valid * 7 / 8)
    torch.testing.assert_close(build(reduction="sum")(outputs, labels)["supcon"], valid * 7)


def test_unlabelled_row_is_a_negative_in_the_denominator():
    outputs, labels = batch(0)
    labels[0] = 1
    labels[1] = 1
    labels[-1] = 0
    with_it = build()(outputs, labels)["supcon"]
    without = build()(outputs[:-1], labels[:-1])["supcon"]
    assert with_it > without


def test_nothing_flows_into_the_memory():
    outputs, labels = batch(0)
    ref, ref_y = batch(7, n=12)
    ref.requires_grad_()
    value = build()(outputs.requires_grad_(), labels, memory=(ref, ref_y))["supcon"]
    value.backward()
    assert ref.grad is None


def test_memory_may_be_an_object_with_ref_and_ref_y():
    class Held:
        ref, ref_y = batch(7, n=12)

    outputs, labels = batch(0)
    pair = build()(outputs, labels, memory=(Held.ref, Held.ref_y))["supcon"]
    assert torch.equal(build()(outputs, labels, memory=Held())["supcon"], pair)


@pytest.mark.parametrize(
    ("hyper", "words"),
    [
        ({"tau": 0}, "tau .* greater than 0, not 0"),
        ({"tau": -0.1}, "not -0.1"),
        ({"tau": float("nan")}, "not nan"),
        ({"tau": "hot"}, "not 'hot'"),
        ({"reduction": "mean"}, "'mean': choose one of valid, batch, sum"),
        ({"positives": "some"}, "'some': choose one of any, all"),
        ({"base_temperature": 0}, "base_temperature"),
        ({"empty_match": True}, "set positives='all'"),
    ],
)
def test_bad_hyperparameters(hyper, words):
    with pytest.raises(BadConfig, match=words):
        build(**hyper)


def test_bad_batches():
    outputs, labels = batch(0)
    with pytest.raises(BadCodes, match=r"\(B, 5\)"):
        build()(outputs[:, :4], labels)
    with pytest.raises(BadCodes, match="labels"):
        build()(outputs, labels[:-1])
    with pytest.raises(BadCodes, match="0 or 1"):
        build()(outputs, 2 * labels)
    outputs[2, 1] = torch.nan
    with pytest.raises(BadCodes, match="NaN"):
        build()(outputs, labels)


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(4, 5),
        (torch.zeros(4, 5),),
        (torch.zeros(4, 6), torch.zeros(4, 4)),
        (torch.zeros(3, 5), torch.zeros(4, 4)),
    ],
    ids=["tensor", "one", "width", "length"],
)
def test_bad_memory(memory):
    with pytest.raises(BadCodes, match="memory"):
        build()(*batch(0), memory=memory)
