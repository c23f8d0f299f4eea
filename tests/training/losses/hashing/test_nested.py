import pytest
import torch

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses import LOSSES, build_loss, loss_class
from hashseek.training.losses.hashing.zeta import zeta
from support.literal_losses import batch, features_for

CLASSIFICATION = [name for name in LOSSES if loss_class(name).kind == "classification"]

# Says that batches as small as these leave half of it untrained.
pytestmark = pytest.mark.filterwarnings("ignore:HBL's margins need")


def build(name="hyp2", n_bits=8, n_classes=4, nested=None, **hyper):
    nested = {"lengths": [4, 6, 8]} if nested is None else nested
    return build_loss(name, n_classes=n_classes, n_bits=n_bits, nested=nested, **hyper)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in CLASSIFICATION])
def test_it_is_the_loss_of_every_prefix(name):
    outputs, labels = batch(0, n=8, width=8)
    given = features_for(name, 8)
    loss = build(name, nested={"lengths": [4, 6, 8], "weights": [0, 2, 0.5]})
    found = loss(outputs, labels, **given)
    assert len(found) % 3 == 0
    for length, weight, part in zip((4, 6, 8), (0, 2, 0.5), loss.losses, strict=True):
        for term, value in part(outputs[:, :length], labels, **given).items():
            torch.testing.assert_close(found[f"{term}@{length}"], weight * value)


def test_every_length_has_its_own_proxies_and_margin():
    loss = build()
    assert [tuple(part.proxies.shape) for part in loss.losses] == [(4, 4), (4, 6), (4, 8)]
    assert [part.zeta for part in loss.losses] == [zeta(k, 4) for k in (4, 6, 8)]
    assert set(loss(*batch(0, width=8))) == {f"{t}@{k}" for t in ("proxy", "irrelevant") for k in (4, 6, 8)}


@pytest.mark.parametrize("name", ["dpsh", "hashnet", "dsh"])
def test_a_memory_is_cut_likewise(name):
    outputs, labels = batch(0, width=8)
    ref, ref_y = batch(5, n=11, width=8)
    found = build(name)(outputs, labels, memory=(ref, ref_y))
    alone = build_loss(name, n_classes=4, n_bits=6)(outputs[:, :6], labels, memory=(ref[:, :6], ref_y))
    torch.testing.assert_close(found["pairs@6"], alone["pairs"])


@pytest.mark.parametrize(
    "nested",
    [
        *({"lengths": lengths} for lengths in ([4, 6], [6, 4, 8], [4, 4, 8], [], [0, 8], [4.5, 8], 8)),
        *({"lengths": [4, 8], "weights": weights} for weights in ([1], [1, -1], [0, 0], 1)),
        {"length": [4, 8]},
        {"weights": [1]},
        [4, 8],
        {"lengths": [1, 8]},  # 1 bit cannot separate 4 labels
    ],
)
def test_bad_tables(nested):
    with pytest.raises(BadConfig):
        build(nested=nested)


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_logits_have_no_prefixes(name):
    with pytest.raises(BadConfig):
        build(name)


def test_bad_batches():
    with pytest.raises(BadCodes):
        build()(torch.zeros(3, 7), torch.zeros(3, 4))
    with pytest.raises(BadCodes, match="memory"):
        build("dpsh")(torch.zeros(3, 8), torch.zeros(3, 4), memory=(torch.zeros(2, 7), torch.zeros(2, 4)))
