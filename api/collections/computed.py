"""Results that take long to compute from a whole collection: computed once per state, one at a time in a process."""

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from hashseek.api.messages.problems import StillComputing
from hashseek.indexing.catalog import Catalog

T = TypeVar("T")

WAIT_SECONDS = 2.0  # a request waits this long for a result, holding a thread of the service
_KEPT = 3  # finished results per collection; those that are being computed are kept as well
_ONE_AT_A_TIME = threading.Lock()
_WAITING = threading.BoundedSemaphore(8)  # limits how many requests wait, so that threads are left for others


class Computed:
    """Results by name, each computed in its own thread, and again after the collection has changed.

    While a collection keeps changing, a result may be as old as the time it took to compute. Otherwise a result that
    takes longer than the time between two changes would never be returned.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The state of the collection; the result, and until when it may be used for later states.
        self._results: dict[Hashable, tuple[Hashable, Future[tuple[Any, float]]]] = {}

    def get(self, name: Hashable, catalog: Catalog, compute: Callable[[], T]) -> T:
        """The result of `compute` for this state of the catalog, computed now unless it exists or is being computed.

        Raises:
            StillComputing: it takes longer than `WAIT_SECONDS`, or too many requests are waiting; it continues in the
                background.
        """
        now = catalog.uuid, catalog.space.id, catalog.generation()
        with self._lock:
            state, future = self._results.get(name, (None, None))
            is_old = (
                future is not None
                and future.done()
                and future.exception() is None
                and state != now
                and time.monotonic() > future.result()[1]
            )
            if future is None or is_old:
                future = Future()
                self._results.pop(name, None)
                done = [other for other, (_, one) in self._results.items() if one.done()]  # the oldest first
                for other in done[:-_KEPT]:
                    del self._results[other]
                self._results[name] = state, future = now, future
                threading.Thread(target=self._compute, args=(future, compute), daemon=True).start()
        waits = _WAITING.acquire(blocking=False)
        try:
            found: T = future.result(WAIT_SECONDS if waits else 0)[0]
        except TimeoutError:
            raise StillComputing("the answer is still being computed: try again in a second") from None
        except Exception:
            with self._lock:  # the next request tries again
                if self._results.get(name) == (state, future):
                    del self._results[name]
            raise
        finally:
            if waits:
                _WAITING.release()
        return found

    def _compute(self, future: Future[tuple[Any, float]], compute: Callable[[], Any]) -> None:
        with _ONE_AT_A_TIME:
            started = time.monotonic()
            try:
                value = compute()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result((value, 2 * time.monotonic() - started))
