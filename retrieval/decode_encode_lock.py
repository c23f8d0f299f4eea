"""A lock that keeps decoding threads and the network apart on a CPU, where they would compete for the cores.

A network pass uses all cores and waits for the slowest one at every layer, so a single decoding thread beside it costs
far more time than it needs itself.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DecodeEncodeLock:
    """Many threads may decode at once, or one may encode. A thread that waits to encode goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_decoding = 0
        self._encoding = False

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Context in which no thread encodes."""
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
        """Context in which no other thread decodes or encodes."""
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
