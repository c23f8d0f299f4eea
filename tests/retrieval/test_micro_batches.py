"""Encoding together what several threads bring."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hashseek.retrieval.micro_batches import MicroBatches
from support.commands import wait_until


def image(number):
    return np.full((3, 4, 4), number, np.uint8)


def test_each_thread_gets_its_own_row_and_those_that_come_during_a_pass_share_the_next():
    sizes, began, go_on = [], threading.Event(), threading.Event()

    def encode(pixels):
        began.set()
        assert go_on.wait(20)
        values = pixels.reshape(len(pixels), -1).astype(np.float32)
        return values[:, :2], -values[:, :3]

    together = MicroBatches(encode, sizes.append)
    with ThreadPoolExecutor(50) as threads:
        first = threads.submit(together, image(0))
        assert began.wait(20)  # alone: it does not wait for others
        others = [threads.submit(together, image(number)) for number in range(1, 50)]
        wait_until(lambda: len(together._waiting) == 49)
        go_on.set()
        for number, found in enumerate([first, *others]):
            features, outputs = found.result()
            assert features.tolist() == [[number] * 2]
            assert outputs.tolist() == [[-number] * 3]
        assert sizes == [1, 49]
        many = list(threads.map(lambda number: together(image(number))[0][0, 0], range(200)))
    assert many == list(range(200))
    assert sum(sizes) == 250


def test_an_error_reaches_every_thread_of_its_pass_and_none_later():
    def encode(pixels):
        if pixels.max() == 9:
            raise MemoryError("no room")
        return pixels[:, 0, 0], pixels[:, 0, 0]

    together = MicroBatches(encode, lambda n: None)
    with pytest.raises(MemoryError):
        together(image(9))
    assert together(image(1))[0].tolist() == [[1] * 4]
