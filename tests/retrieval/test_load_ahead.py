"""Loading ahead: in order, no further than it may, and without keeping back what is done."""

import threading
import time

import pytest

from hashseek.retrieval.load_ahead import load_ahead, one_ahead


@pytest.mark.parametrize("n", [0, 1, 7, 100])
@pytest.mark.parametrize("in_worker", [lambda _: True, lambda _: False, lambda item: item % 3 == 0])
def test_items_come_in_order_and_no_more_are_drawn_than_may_be(n, in_worker):
    drawn = []

    def items():
        for item in range(n):
            drawn.append(item)
            yield item

    found = []
    for result in load_ahead(items(), lambda item: 10 * item, depth=8, n_workers=3, in_worker=in_worker):
        found.append(result)
        assert len(drawn) <= len(found) + 8
    assert found == [10 * item for item in range(n)]


def test_what_is_loaded_does_not_wait_for_a_slow_source():
    arrived = []

    def items():
        for item in range(600):
            if arrived:
                return
            time.sleep(0.1)
            yield item

    for item in load_ahead(items(), lambda item: item, depth=1000):
        arrived.append(item)
    assert arrived == [*range(len(arrived))]
    assert len(arrived) < 600, "the first one does not wait until all were drawn"


def test_an_error_of_one_item_ends_it_and_starts_nothing_more():
    started = []

    def load(item):
        started.append(item)
        if item == 2:
            raise ValueError("torn")
        return item

    results = load_ahead(range(1000), load, depth=4, n_workers=2)
    with pytest.raises(ValueError, match="torn"):
        list(results)
    assert len(started) < 20


@pytest.mark.parametrize("n", [0, 1, 5])
def test_one_item_is_computed_ahead(n):
    started = [threading.Event() for _ in range(n + 1)]

    def items():
        for i in range(n):
            started[i].set()
            yield i
        started[n].set()

    found = []
    for item in one_ahead(items()):
        found.append(item)
        assert started[item + 1].wait(10)
    assert found == list(range(n))


def test_stopping_early_ends_the_source():
    ended = threading.Event()

    def items():
        try:
            yield from range(100)
        finally:
            ended.set()

    found = one_ahead(items())
    assert next(found) == 0
    found.close()
    assert ended.wait(10)


def test_an_error_while_computing_ahead_is_raised():
    def items():
        yield 1
        raise KeyError("two")

    with pytest.raises(KeyError):
        list(one_ahead(items()))
