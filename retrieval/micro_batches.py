"""Encodes images that several threads submit, in one thread: together, or one after the other."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.images import Pixels

Row = NDArray[np.float32]
Rows = tuple[Row, Row]

_NICENESS = 5  # of the thread: where cores are scarce, it gets a third of the time of another thread


class MicroBatches:
    """Encodes one image for each caller, first come, first served; images submitted during a pass share the next one.

    All passes run in one thread, because PyTorch starts more threads for each thread that calls it. It has a lower
    priority than others, so that a service that is encoding still answers other requests at once.

    Args:
        encode: pixels (B, 3, size, size) -> features (B, D) and outputs (B, K).
        largest: the most images of a pass.
        observe: called with the number of images of each pass.
    """

    def __init__(self, encode: Callable[[Pixels], Rows], largest: int, observe: Callable[[int], object]) -> None:
        self._encode = encode
        self._largest = largest
        self._observe = observe
        self._start()
        _in_use.add(self)

    def _start(self) -> None:
        self._thread = ThreadPoolExecutor(1, "hashseek-encode", lower_priority)
        self._waiting: deque[tuple[Pixels, Future[Rows]]] = deque()

    def __call__(self, pixels: Pixels) -> Rows:
        """Features (1, D) and outputs (1, K) of one image (3, size, size). Errors of a pass go to all its callers."""
        own: Future[Rows] = Future()
        self._waiting.append((pixels, own))
        self._thread.submit(self._run)
        return own.result()

    def _run(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._largest))]
        if not batch:  # all have been encoded
            return
        try:
            features, outputs = self._encode(np.stack([pixels for pixels, _ in batch]))
        except BaseException as error:
            for _, future in batch:
                future.set_exception(error)
            return
        self._observe(len(batch))
        for row, (_, future) in enumerate(batch):
            future.set_result((features[row : row + 1], outputs[row : row + 1]))


_in_use: WeakSet[MicroBatches] = WeakSet()


def _restart() -> None:
    """Threads do not survive a fork."""
    for batches in _in_use:
        batches._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart)


def lower_priority() -> None:
    """Lower the priority of this thread, and of those that it starts; OpenVINO starts some when it loads a network.

    Only Linux has priorities of threads.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may forbid it; encoding works without it
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
