import math

import pytest
import torch

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses import LOSSES, build_loss
from hashseek.training.losses.hashing.quantization import QUANTIZERS
from support.literal_losses import batch, features_for

# Says that batches as small as these leave half of it untrained.
pytestmark = pytest.mark.filterwarnings("ignore:HBL's margins need")


def sign(value):
    return (value > 0) - (value < 0)


def literal(kind, outputs):
    values = []
    for row in outputs:
        signs = [sign(u.item()) for u in row]
        if kind == "cos":
            length = sum(u * u for u in row).sqrt() if row.any() else 1.0
            product = sum(u * s for u, s in zip(row, signs, strict=True))
            values.append(1 - product / (length * math.sqrt(max(sum(map(abs, signs)), 1))))
            continue
        for u, s in zip(row, signs, strict=True):
            size = u * s
            values.append(
                {
                    "l1": lambda size=size: abs(size - 1),
                    "l2": lambda u=u, s=s: (u - s) ** 2,
                    "logcosh": lambda size=size: torch.log(torch.cosh(size - 1)),
                    "square": lambda size=size: (size - 1) ** 2,
                }[kind]()
            )
    return sum(values) / len(values)


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_loops_in_value_and_gradient(kind, seed):
    outputs = 2 * batch(seed)[0]
    for function in (QUANTIZERS[kind], lambda u: literal(kind, u)):
        leaf = outputs.clone().requires_grad_()
        value = function(leaf)
        found = value.detach(), *torch.autograd.grad(value, leaf)
        if function is QUANTIZERS[kind]:
            fast = found
    for a, b in zip(fast, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("l1", (0 + 1 + 1 + 0.5) / 4),
        ("l2", (0 + 1 + 0 + 0.25) / 4),  # sgn 0 = 0, so an output of 0 counts nothing
        ("square", (0 + 1 + 1 + 0.25) / 4),
        ("logcosh", (2 * math.log(math.cosh(1)) + math.log(math.cosh(0.5))) / 4),
        ("cos", ((1 - 3 / math.sqrt(5 * 2)) + 0) / 2),
    ],
)
def test_two_rows_worked_by_hand(kind, expected):
    outputs = torch.tensor([[1.0, -2.0], [0.0, -0.5]], dtype=torch.float64)
    assert QUANTIZERS[kind](outputs).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_binary_outputs_cost_nothing_and_long_ones_stay_finite(kind):
    codes = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]], dtype=torch.float64)
    assert QUANTIZERS[kind](codes).item() == pytest.approx(0, abs=1e-15)
    for outputs in (torch.full((2, 3), 800.0), torch.full((2, 3), -800.0), torch.zeros(2, 3), torch.zeros(0, 3)):
        leaf = outputs.clone().requires_grad_()
        value = QUANTIZERS[kind](leaf)
        value.backward()
        assert value.isfinite()
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_takes_it(name):
    outputs, labels = batch(0, n=8, width=4)
    given = features_for(name, 8)
    torch.manual_seed(0)
    plain = build_loss(name, n_classes=4, n_bits=4)
    torch.manual_seed(0)
    loss = build_loss(name, n_classes=4, n_bits=4, quantization={"kind": "l2", "weight": 0.3})
    terms, more = plain(outputs, labels, **given), loss(outputs, labels, **given)
    extra = 0.3 * QUANTIZERS["l2"](outputs)
    torch.testing.assert_close(more["quantization"], terms.pop("quantization", 0) + extra)
    for term, value in terms.items():
        torch.testing.assert_close(more[term], value)


def test_it_stands_beside_logits():
    outputs, labels = batch(0, width=6)
    loss = build_loss("bce", n_classes=4, n_bits=6, quantization={"kind": "l1", "weight": 1})
    terms = loss(outputs.requires_grad_(), labels, logits=torch.zeros(7, 4))
    torch.testing.assert_close(terms["quantization"], QUANTIZERS["l1"](outputs))
    assert torch.autograd.grad(terms["quantization"], outputs)[0].any()
    outputs.data[0, 0] = math.nan
    with pytest.raises(BadCodes, match="outputs"):
        loss(outputs, labels, logits=torch.zeros(7, 4))


@pytest.mark.parametrize(
    "quantization",
    [
        {"kind": "l3", "weight": 1},
        {"kind": "l1", "weight": -1},
        {"kind": "l1"},
        {"weight": 1},
        {"kind": "l1", "wieght": 1},
        "l1",
    ],
)
def test_bad_tables(quantization):
    with pytest.raises(BadConfig, match="quantization"):
        build_loss("hyp2", n_classes=4, n_bits=6, quantization=quantization)
