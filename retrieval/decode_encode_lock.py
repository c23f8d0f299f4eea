"""Decoding and encoding take turns on a processor: together they would fight for its cores.

A pass of the network is spread over all cores and waits for the slowest of them at every layer; one decoding thread
beside it slows it down by far more than it takes itself.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Any number of threads decode at a time, or one encodes; who wants to encode comes next."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_decoding = 0
        self._encoding = False

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Wait while a network computes; then it waits for us."""
        with self._changed:
            self._changed.wait_for(lambda: not self._encoding)
            self._n_decoding += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_decoding -= 1
                self._changed.notify_all()

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Let nobody begin to decode, and wait for those who do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._encoding)
            self._encoding = True
            self._changed.wait_for(lambda: not self._n_decoding)
        try:
            yield
        finally:
            with self._changed:
                self._encoding = False
                self._changed.notify_all()
