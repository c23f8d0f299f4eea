"""Encoding together what several threads bring."""

import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

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

    together = MicroBatches(encode, 64, sizes.append)
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


@pytest.mark.parametrize("largest", [1, 3])
def test_a_pass_has_at_most_the_largest_number_of_images(largest):
    sizes, go_on = [], threading.Event()

    def encode(pixels):
        assert go_on.wait(20)
        values = pixels.reshape(len(pixels), -1).astype(np.float32)
        return values[:, :1], values[:, :1]

    together = MicroBatches(encode, largest, sizes.append)
    with ThreadPoolExecutor(20) as threads:
        found = [threads.submit(together, image(number)) for number in range(20)]
        wait_until(lambda: len(together._waiting) >= 19 - largest)
        go_on.set()
        assert [one.result()[0][0, 0] for one in found] == list(range(20))
    assert max(sizes) == largest
    assert sum(sizes) == 20


def test_passes_run_in_one_thread_that_yields_to_others():
    threads_used = set()

    def encode(pixels):
        thread = threading.get_native_id()
        threads_used.add((thread, os.getpriority(os.PRIO_PROCESS, thread)))
        return pixels[:, 0, 0], pixels[:, 0, 0]

    together = MicroBatches(encode, 2, lambda n: None)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: together(image(number)), range(20)))
    [(thread, niceness)] = threads_used
    assert thread != threading.get_native_id()
    if sys.platform == "linux":
        assert niceness > os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


FORK = """
import os, signal
import numpy as np
from hashseek.retrieval.micro_batches import MicroBatches

together = MicroBatches(lambda pixels: (pixels[:, 0, 0], pixels[:, 0, 0]), 64, lambda n: None)
image = np.full((3, 4, 4), 7, np.uint8)
together(image)
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(together(image)[0].tolist() != [[7] * 4])
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_encodes_without_the_thread_of_its_parent():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=240, capture_output=True, text=True
    )
    assert done.stdout.split() == ["0"]


def test_an_error_reaches_every_thread_of_its_pass_and_none_later():
    def encode(pixels):
        if pixels.max() == 9:
            raise MemoryError("no room")
        return pixels[:, 0, 0], pixels[:, 0, 0]

    together = MicroBatches(encode, 64, lambda n: None)
    others = [Future(), Future()]
    together._waiting.extend((image(1), future) for future in others)
    with pytest.raises(MemoryError):
        together(image(9))
    assert [type(future.exception(0)) for future in others] == [MemoryError, MemoryError]
    assert together(image(1))[0].tolist() == [[1] * 4]
