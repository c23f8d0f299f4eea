import pytest
import torch
from torch.nn import functional as F

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses import build_loss
from hashseek.training.losses.hashing.hyp2 import HyP2
from support.literal_losses import batch, total


def build(n_classes=4, n_bits=5, **hyper):
    return HyP2(n_classes=n_classes, n_bits=n_bits, **hyper)


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


def test_a_second_derivative_is_refused():
    outputs, labels = batch(0)
    leaf = outputs.requires_grad_()
    value = total(build(zeta=0.05).double()(leaf, labels))
    (gradient,) = torch.autograd.grad(value**2, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


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


def test_three_cells_in_seventeen_million_are_counted():
    loss = build(4001, 2, zeta=-1.0, parts="proxy")
    labels = torch.ones(4200, 4001)
    labels[[5, 700, 4199], [3, 8, 0]] = 0
    outputs = torch.randn(4200, 2, generator=torch.Generator().manual_seed(0))
    cosines = F.normalize(outputs.double()) @ F.normalize(loss.proxies.detach().double()).T
    expected = (1 - cosines)[labels == 1].mean() + (cosines + 1)[labels == 0].mean()
    assert loss(outputs, labels)["proxy"].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    "hyper", [{"parts": "proxy", "beta": 1.0}, {"parts": "pair", "beta": 0.0}, {"n_classes": 300}, {"n_bits": 1}]
)
def test_settings_that_do_not_fit_each_other(hyper):
    with pytest.raises(BadConfig):
        build(**hyper)
