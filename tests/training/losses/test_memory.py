import math
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hashseek.retrieval.errors import BadCodes, BadConfig
from hashseek.training.losses import build_loss
from hashseek.training.losses.contrastive.supcon import SupCon
from hashseek.training.losses.memory import KeyQueue, update_key_encoder
from support.literal_losses import batch


def queue_of(size, **hyper):
    return KeyQueue(n_classes=4, n_bits=5, size=size, **hyper)


def as_set(memory):
    return sorted(zip(memory.ref.tolist(), memory.ref_y.tolist(), strict=True))


def numbered(n, start=0):
    """Keys that normalise to themselves and can be told apart, with labels."""
    angle = torch.arange(start, start + n) * 0.1
    keys = torch.zeros(n, 5)
    keys[:, 0], keys[:, 1] = angle.cos(), angle.sin()
    labels = F.one_hot(torch.arange(start, start + n) % 4, 4)
    return keys, labels


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [4, 1, 4, 3, 2, 4, 4], [1] * 15, [10, 10, 7, 9], [0, 10, 0, 3]])
def test_holds_the_latest_rows_whatever_the_batch_sizes(sizes):
    queue, expected = queue_of(10), deque(maxlen=10)
    start = 0
    for n in sizes:
        keys, labels = numbered(n, start)
        start += n
        queue.enqueue(keys, labels)
        expected.extend(zip(F.normalize(keys).tolist(), labels.tolist(), strict=True))
        assert len(queue) == len(expected)
        held = as_set(queue.memory())
        torch.testing.assert_close(
            torch.tensor([a for a, _ in held]).reshape(-1, 5),
            torch.tensor([a for a, _ in sorted(expected)]).reshape(-1, 5),
        )
        assert [b for _, b in held] == [b for _, b in sorted(expected)]


@pytest.mark.parametrize("name", ["dpsh", "dsh", "dhn", "hashnet", "idhn"])
def test_losses_on_inner_products_and_distances_get_the_rows_as_they_are(name):
    queue = queue_of(12, normalized=False).double()
    (earlier, earlier_y), (keys, labels) = batch(0), batch(3, n=4)
    queue.enqueue(3 * earlier, earlier_y)
    memory = queue.memory(keys, labels)
    assert torch.equal(memory.ref, torch.cat([keys, 3 * earlier]))
    loss = build_loss(name, n_classes=4, n_bits=5)
    outputs, own = batch(6)
    by_queue = loss(outputs, own, memory=memory)
    by_hand = loss(outputs, own, memory=(torch.cat([keys, 3 * earlier]), torch.cat([labels, earlier_y])))
    for term, value in by_hand.items():
        assert torch.equal(by_queue[term], value)


def test_memory_is_the_keys_of_the_batch_then_the_queue_as_it_was():
    queue = queue_of(8)
    first, second = numbered(3), numbered(2, 3)
    queue.enqueue(*first)
    memory = queue.memory(*second)
    torch.testing.assert_close(memory.ref, torch.cat([second[0], first[0]]))
    assert torch.equal(memory.ref_y, torch.cat([second[1], first[1]]))
    queue.enqueue(*second)
    torch.testing.assert_close(memory.ref, torch.cat([second[0], first[0]]))  # a copy, not a view
    assert len(queue) == 5


def test_a_later_enqueue_does_not_change_what_a_loss_still_needs():
    queue = queue_of(3)
    queue.enqueue(*numbered(3))
    for start, own in ((3, ()), (6, numbered(3, 3))):
        memory = queue.memory(*own)
        before = memory.ref.clone(), memory.ref_y.clone()
        queue.enqueue(*numbered(3, start))
        assert torch.equal(memory.ref, before[0])
        assert torch.equal(memory.ref_y, before[1])


def test_until_full_gives_only_the_batch():
    queue = queue_of(5, until_full=True)
    queue.enqueue(*numbered(3))
    assert len(queue.memory().ref) == 0
    assert len(queue.memory(*numbered(2)).ref) == 2
    queue.enqueue(*numbered(2, 3))
    assert len(queue.memory().ref) == 5
    assert len(queue.memory(*numbered(2)).ref) == 7


def test_queue_smaller_than_batch_is_one_clear_error():
    queue = queue_of(4)
    queue.enqueue(*numbered(4))
    before = queue.memory()
    with pytest.raises(BadCodes, match="5"):
        queue.enqueue(*numbered(5))
    assert torch.equal(queue.memory().ref, before.ref)


def test_travels_with_a_checkpoint():
    queue, other = queue_of(6), queue_of(6)
    for start in range(0, 9, 3):
        queue.enqueue(*numbered(3, start))
    other.load_state_dict(queue.state_dict())
    queue.enqueue(*numbered(2, 9))
    other.enqueue(*numbered(2, 9))
    assert as_set(other.memory()) == as_set(queue.memory())
    assert len(other) == 6
    assert not list(queue.parameters())


def test_float64_keys_stay_exact_beside_a_float32_queue():
    queue = queue_of(6).double()
    keys, labels = batch(0, n=3)
    queue.enqueue(keys, labels)
    assert torch.equal(queue.memory().ref, F.normalize(keys))
    assert queue.memory(keys, labels).ref.dtype == torch.float64


def test_bad_keys():
    queue = queue_of(6)
    keys, labels = numbered(3)
    with pytest.raises(BadCodes):
        queue.memory(keys)
    for bad in ((keys[:, :4], labels), (keys, 2 * labels), (keys * torch.nan, labels)):
        with pytest.raises(BadCodes):
            queue.enqueue(*bad)


def encoder():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_key_encoder_moves_by_momentum_and_copies_buffers():
    torch.manual_seed(0)
    query, key = encoder(), encoder()
    query(torch.randn(5, 3))  # moves the running statistics
    before = [p.clone() for p in key.parameters()]
    update_key_encoder(key, query, momentum=0.9)
    for now, old, target in zip(key.parameters(), before, query.parameters(), strict=True):
        torch.testing.assert_close(now, 0.9 * old + 0.1 * target)
        assert now.grad_fn is None
    for now, target in zip(key.buffers(), query.buffers(), strict=True):
        assert torch.equal(now, target)


def test_key_encoder_refuses_what_does_not_fit():
    with pytest.raises(BadConfig, match="momentum"):
        update_key_encoder(encoder(), encoder(), momentum=1.5)
    with pytest.raises(BadConfig):
        update_key_encoder(encoder(), nn.Linear(3, 2))


def test_own_key_is_a_positive_in_the_order_of_the_specification():
    queue = queue_of(4)
    keys, labels = numbered(2)
    value = SupCon(n_classes=4, n_bits=5, tau=1.0)(keys, labels, memory=queue.memory(keys, labels))["supcon"]
    assert value.item() == pytest.approx(math.log(1 + math.exp(math.cos(0.1) - 1)))
