import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses import build_loss
from hashseek.training.losses.hashing.hyp2 import PARTS, HyP2
from support.literal_losses import assert_same, batch, cos, gradients_of, label_sets, total

OPTIONS = [
    {},
    {"beta": 1.0, "zeta": -0.2},
    {"zeta": 0.3, "offset": 0.0},
    {"parts": "proxy"},
    {"parts": "pair"},
    {"parts": "pair", "zeta": -0.1, "offset": 0.0},
    {"parts": "proxy+pair", "beta": 0.7, "zeta": 0.1},
    {"parts": "proxy+pair", "beta": 0},
    {"beta": 0},
]


def build(n_classes=4, n_bits=5, **hyper):
    return HyP2(n_classes=n_classes, n_bits=n_bits, **hyper)


def mean_or_0(values, like):
    return sum(values) / len(values) if values else 0 * like.sum()


def literal(outputs, proxies, labels, *, zeta, beta=0.5, offset=1.0, parts="proxy+irrelevant"):
    sets = label_sets(labels)
    rows = range(len(outputs))
    result = 0 * outputs.sum()
    if "proxy" in parts:
        near, far = [], []
        for i, j in itertools.product(rows, range(len(proxies))):
            c = cos(outputs[i], proxies[j])
            if j in sets[i]:
                near.append(offset - c)
            else:
                far.append(c - zeta if c > zeta else 0 * c)
        result = result + mean_or_0(near, outputs) + mean_or_0(far, outputs)
    if "irrelevant" in parts:
        far = []
        for i, k in itertools.product(rows, rows):
            if len(sets[i]) > 1 and len(sets[k]) > 1 and not sets[i] & sets[k]:
                c = cos(outputs[i], outputs[k])
                far.append(c - zeta if c > zeta else 0 * c)
        result = result + beta * mean_or_0(far, outputs)
    if "pair" in parts:
        near, far = [], []
        for i, k in itertools.permutations(rows, 2):
            c = cos(outputs[i], outputs[k])
            if sets[i] & sets[k]:
                near.append(offset - c)
            else:
                far.append(c - zeta if c > zeta else 0 * c)
        weight = 1 if parts == "pair" else beta
        result = result + weight * (mean_or_0(near, outputs) + mean_or_0(far, outputs))
    return result


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_loops_in_value_and_gradient(options, seed):
    outputs, labels = batch(seed, n=9, n_classes=6)
    loss = build(6, **options)
    slow = partial(literal, labels=labels, **{"zeta": loss.zeta, **options})
    if loss.proxies is None:
        assert_same(loss, lambda z: slow(z, ()), outputs, labels)
    else:
        assert_same(loss, slow, outputs, labels)


def test_four_rows_worked_by_hand():
    outputs = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]])
    loss = build(4, 2, zeta=0.5, beta=2.0).double()
    loss.proxies.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 5.0], [0.0, -1.0]], dtype=torch.float64)
    root = 0.5**0.5
    # Cosines with the proxies: (1, -1, 0, 0), (0, 0, 1, -1), (root, -root, root, -root), (-1, 1, 0, 0).
    positive = ((1 - 1) + (1 + 1) + (1 - 1) + (1 + 1) + (1 - root) + (1 + root) + (1 + 1)) / 7
    negative = (0.5 + (root - 0.5)) / 9
    # Row 0 shares no label with 1 (cosine 0) and 2 (cosine root); row 3 has one label only.
    irrelevant = 2.0 * (2 * (root - 0.5)) / 4
    terms = loss(outputs, labels)
    assert terms["proxy"].item() == pytest.approx(positive + negative, abs=1e-12)
    assert terms["irrelevant"].item() == pytest.approx(irrelevant, abs=1e-12)
    pair = build(4, 2, zeta=0.5, parts="pair").double()(outputs, labels)["pair"]
    # Rows 0 and 3 share a label (cosine -1), so do 1 and 2 (root); 0-1 and 1-3 have cosine 0, 0-2 root, 2-3 -root.
    assert pair.item() == pytest.approx((2 + (1 - root)) / 2 + (root - 0.5) / 4, abs=1e-12)


def test_slopes_are_those_of_equation_6():
    cosines = torch.tensor([[0.48, 0.6, -0.64], [0.0, 0.6, 0.8]], dtype=torch.float64)  # with the axes
    labels = torch.tensor([[1, 0, 0], [0, 0, 1]])
    loss = build(3, 3, zeta=0.0).double()
    loss.proxies.data = torch.eye(3).double()
    leaf = (3 * cosines).requires_grad_()
    terms = loss(leaf, labels)
    assert terms["proxy"].item() == pytest.approx((2 - 0.48 - 0.8) / 2 + (0.6 + 0.6) / 4)
    at_rows, at_proxies = torch.autograd.grad(terms["proxy"], [leaf, loss.proxies])
    slopes = torch.tensor([[-1 / 2, 1 / 4, 0], [0, 1 / 4, -1 / 2]]).double()  # 0 at c = zeta exactly
    across = slopes - cosines * (slopes * cosines).sum(dim=1, keepdim=True)
    torch.testing.assert_close(at_rows, across / 3)
    pulled = slopes.T @ cosines
    torch.testing.assert_close(at_proxies, pulled - torch.diag(pulled.diagonal()))


def test_pairs_have_slope_beta_over_their_number():
    outputs = F.normalize(torch.randn(4, 6, dtype=torch.float64), dim=1)
    labels = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]])
    loss = build(4, 6, zeta=-1.0, beta=0.8).double()
    leaf = outputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, labels)["irrelevant"], leaf)
    along = 2 * 0.8 / 8 * torch.stack([outputs[[1, 3]].sum(0), outputs[[0, 2]].sum(0)] * 2)
    across = along - outputs * (along * outputs).sum(dim=1, keepdim=True)
    torch.testing.assert_close(gradient, across)


def test_equals_the_authors_code():
    outputs, labels = batch(0, n=12, width=8, n_classes=6)
    loss = build(6, 8, zeta=0.1, beta=0.75).double()
    x, p = F.normalize(outputs), F.normalize(loss.proxies)
    product = x @ p.T
    positive, negative = 1 - product, F.relu(product - 0.1)
    proxy = positive[labels == 1].sum() / (labels == 1).sum() + negative[labels == 0].sum() / (labels == 0).sum()
    several = labels.sum(dim=1) > 1
    x_sel, t_sel = x[several], labels[several]
    apart = t_sel @ t_sel.T == 0
    assert apart.any()
    terms = loss(outputs, labels)
    torch.testing.assert_close(terms["proxy"], proxy)
    torch.testing.assert_close(terms["irrelevant"], 0.75 * F.relu(x_sel @ x_sel.T - 0.1)[apart].mean())


def test_offset_moves_the_value_and_not_the_gradient():
    outputs, labels = batch(3)
    loss = build(zeta=0.1).double()
    code = gradients_of(loss, outputs, labels)
    loss.offset = 0.0
    paper = gradients_of(loss, outputs, labels)
    assert code[0] - paper[0] == pytest.approx(1.0)
    for a, b in zip(code[1], paper[1], strict=True):
        assert torch.equal(a, b)


def test_length_of_rows_does_not_matter():
    outputs, labels = batch(0)
    loss = build(zeta=0.1).double()
    torch.testing.assert_close(total(loss(7 * outputs, labels)), total(loss(outputs, labels)))


@pytest.mark.parametrize(
    "labels",
    [torch.zeros(3, 4), torch.ones(3, 4), torch.eye(4)[:3]],
    ids=["no positive cell", "no negative cell", "no irrelevant pair"],
)
def test_empty_sets_are_0_where_the_code_has_nan(labels):
    value, gradients = gradients_of(build(zeta=0.1), torch.randn(3, 5), labels)
    assert value.isfinite()
    assert all(g.isfinite().all() for g in gradients)
    assert build(zeta=0.1)(torch.randn(3, 5), labels)["irrelevant"] == 0


def test_a_pair_term_without_pairs_is_attached_and_0():
    value, (gradient,) = gradients_of(build(zeta=0.1, parts="pair"), torch.randn(1, 5), torch.ones(1, 4))
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("labels", ["many", "single", "none"])
def test_the_formulas_that_are_compiled_are_the_same(parts, labels):
    """`torch.compile` traces other code than what runs without it: without its tracing, so that values are compared."""
    outputs, many = batch(0, n=12, n_classes=6)
    outputs[3] = 0
    outputs[4] *= 1e-14  # shorter than a norm is let be
    labels = {"many": many, "single": torch.eye(6)[torch.arange(12) % 6], "none": torch.zeros(12, 6)}[labels]
    loss = build(6, zeta=0.05, parts=parts).double()
    found = gradients_of(loss, outputs, labels)
    with patch("torch.compiler.is_compiling", return_value=True):
        formulas = gradients_of(loss, outputs, labels)
    torch.testing.assert_close(formulas, found, rtol=1e-12, atol=1e-14)


def test_a_second_derivative_is_refused():
    outputs, labels = batch(0)
    leaf = outputs.requires_grad_()
    value = total(build(zeta=0.05).double()(leaf, labels))
    (gradient,) = torch.autograd.grad(value**2, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("parts", PARTS)
def test_gradcheck(parts):
    outputs, labels = batch(0)
    loss = build(zeta=0.05, parts=parts).double()
    inputs = [outputs.requires_grad_(), *loss.parameters()]
    assert torch.autograd.gradcheck(lambda z, *_: total(loss(z, labels)), inputs)


def test_the_gradient_stays_exact_where_backward_runs_under_autocast():
    outputs, labels = batch(0, n=16, width=8, n_classes=6)
    loss = build(6, 8, zeta=0.1)
    exact = gradients_of(loss, outputs.float(), labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = gradients_of(loss, outputs.float(), labels)
    for a, b in zip(inside[1], exact[1], strict=True):
        assert torch.equal(a, b)


def test_proxies_are_drawn_as_in_the_code():
    torch.manual_seed(0)
    loss = HyP2(n_classes=200, n_bits=64)
    assert loss.proxies.std().item() == pytest.approx((2 / 200) ** 0.5, rel=0.05)
    assert loss.zeta == 1 - 58 / 64  # the best [64, 8] code has distance 29
    assert build(38, 12).zeta == pytest.approx(1 / 3)


def test_ablations_by_name():
    for name, terms in (
        ("hyp2", {"proxy", "irrelevant"}),
        ("hyp2_proxy", {"proxy"}),
        ("hyp2_pair", {"pair"}),
        ("hyp2_proxy_pair", {"proxy", "pair"}),
    ):
        loss = build_loss(name, n_classes=4, n_bits=6)
        assert set(loss(torch.randn(5, 6), torch.ones(5, 4))) == terms
        assert ("proxies" in dict(loss.named_parameters())) == ("proxy" in terms)


@pytest.mark.parametrize(
    ("hyper", "words"),
    [
        ({"beta": -1}, "beta .* at least 0, not -1"),
        ({"beta": float("nan")}, "not nan"),
        ({"beta": "1"}, "not '1'"),
        ({"zeta": 1.5}, "zeta .* between -1 and 1, not 1.5"),
        ({"offset": float("inf")}, "offset .* finite number, not inf"),
        ({"beta": None}, "beta .* at least 0, not None"),
        ({"parts": "proxy", "beta": 1.0}, "parts 'proxy' is one term: leave beta=1.0 out"),
        ({"parts": "pair", "beta": 0.0}, "parts 'pair' is one term: leave beta=0.0 out"),
        ({"parts": "irrelevant"}, "parts is 'irrelevant': choose one of proxy"),
        ({"n_classes": 300}, "set the hyperparameter zeta"),
        ({"n_classes": 0, "zeta": 0.1}, "n_classes .* at least 1, not 0"),
        ({"n_bits": 2.5, "zeta": 0.1}, "n_bits .* whole number of at least 1, not 2.5"),
    ],
)
def test_bad_hyperparameters(hyper, words):
    with pytest.raises(BadConfig, match=words):
        build(**hyper)


def test_many_labels_need_a_given_zeta():
    loss = build(300, 16, zeta=0.1)
    assert loss(torch.randn(4, 16), (torch.rand(4, 300) < 0.1).float())["proxy"].isfinite()


@pytest.mark.parametrize("parts", PARTS)
def test_counts_beyond_those_of_float32(parts):
    outputs, labels = batch(0, n=12, n_classes=6)
    loss = build(6, zeta=0.05, parts=parts).double()
    few = gradients_of(loss, outputs, labels)
    with patch("hashseek.training.losses.hashing.hyp2.EXACT", 10):
        many = gradients_of(loss, outputs, labels)
    torch.testing.assert_close(many, few, rtol=0, atol=0)


def test_three_cells_in_seventeen_million_are_counted():
    loss = build(4001, 2, zeta=-1.0, parts="proxy")
    labels = torch.ones(4200, 4001)
    labels[[5, 700, 4199], [3, 8, 0]] = 0
    outputs = torch.randn(4200, 2, generator=torch.Generator().manual_seed(0))
    cosines = F.normalize(outputs.double()) @ F.normalize(loss.proxies.detach().double()).T
    expected = (1 - cosines)[labels == 1].mean() + (cosines + 1)[labels == 0].mean()
    assert loss(outputs, labels)["proxy"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_bad_batches():
    loss = build()
    with pytest.raises(BadCodes, match=r"outputs of shape \(B, 5\), not \(3, 6\)"):
        loss(torch.zeros(3, 6), torch.zeros(3, 4))
    with pytest.raises(BadCodes, match=r"labels of shape \(3, 4\), not \(2, 4\)"):
        loss(torch.zeros(3, 5), torch.zeros(2, 4))
    with pytest.raises(BadCodes, match=r"labels must be 0 or 1, but one is 2"):
        loss(torch.zeros(3, 5), torch.full((3, 4), 2))
    with pytest.raises(BadCodes, match=r"labels must be 0 or 1, but one is 1.0000001\d+: "):
        loss(torch.zeros(3, 5), torch.full((3, 4), 1 + 2**-23))
    outputs = torch.zeros(3, 5)
    outputs[1, 2] = float("inf")
    with pytest.raises(BadCodes, match="NaN or infinity in row 1"):
        loss(outputs, torch.zeros(3, 4))
    loss.proxies.data[2, 0] = float("nan")
    with pytest.raises(BadCodes, match="proxies hold NaN or infinity in row 2"):
        loss(torch.zeros(3, 5), torch.zeros(3, 4))
