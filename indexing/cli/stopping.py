"""Stopping a long command with Ctrl-C or SIGTERM, after what it is doing has been stored."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import typer

T = TypeVar("T")


class Stop(threading.Event):
    """Set once a signal has asked to stop."""

    code = 0
    """The exit code for this signal."""

    def until_set(self, steps: Iterable[T]) -> Iterator[T]:
        """The steps, none of which begins after a signal has asked to stop."""
        remaining = iter(steps)
        while not self.is_set():
            try:
                step = next(remaining)
            except StopIteration:
                return
            yield step

    def exit_if_set(self) -> None:
        """End the command if a signal has asked to stop."""
        if self.code:
            typer.echo("stopped: run the same command again to continue; nothing is stored twice", err=True)
            raise typer.Exit(self.code)


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """The first SIGINT or SIGTERM stops after the current batch, the second one at once.

    Python waits for threads that are downloading; a third one does not.
    """
    stop = Stop()

    def ask(number: int, _: FrameType | None) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt
        stop.code = 128 + number
        stop.set()
        os.write(2, b"stopping after the current batch; press Ctrl-C again to stop at once\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
