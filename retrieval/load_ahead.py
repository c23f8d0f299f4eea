"""Loads items in worker threads ahead of the code that uses them; encoding, indexing and training use it."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from hashseek.retrieval.devices import n_cores

T = TypeVar("T")
R = TypeVar("R")

# If the next item takes longer than this (seconds), results are returned without waiting for `depth` items.
_SLOW_SOURCE = 0.02


def load_ahead(
    items: Iterable[T],
    load: Callable[[T], R],
    *,
    depth: int,
    n_workers: int | None = None,
    in_worker: Callable[[T], bool] = lambda _: True,
) -> Iterator[R]:
    """Yield load(item) for each item, in order, while threads load at most `depth` items ahead.

    Threads are enough because decoding releases the GIL; nothing has to be pickled.

    Args:
        items: read lazily, at most `depth` ahead.
        load: called once for each item; its errors are raised here.
        depth: results that may wait to be used.
        n_workers: threads; None: one more than there are cores, at most 16.
        in_worker: items for which it returns False are loaded in this thread, because they do not block.
    """
    running: deque[Future[R]] = deque()
    with ThreadPoolExecutor(n_workers or min(16, n_cores() + 1)) as pool:
        try:
            started = time.monotonic()
            for item in items:
                running.append(pool.submit(load, item) if in_worker(item) else _loaded(load, item))
                is_slow = time.monotonic() - started > _SLOW_SOURCE
                while len(running) > depth or (is_slow and running and running[0].done()):
                    yield running.popleft().result()
                started = time.monotonic()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Prefetch: compute each item in a thread while the previous one is in use."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item  # type: ignore[misc]


def _loaded(load: Callable[[T], R], item: T) -> Future[R]:
    future: Future[R] = Future()
    future.set_result(load(item))
    return future
