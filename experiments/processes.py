"""Runs that do not depend on each other, side by side in several processes."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import TypeVar

from hashseek.retrieval.errors import HashseekError

Run = TypeVar("Run", bound=tuple[object, ...])
Result = TypeVar("Result")


def in_processes(function: Callable[..., Result], runs: Iterable[Run], *, jobs: int) -> Iterator[tuple[Run, Result]]:
    """Call `function(*run)` for each of `runs`, `jobs` at a time; yields each run with its result when it is finished.

    Every process has one thread: these runs are too small to share between cores, and waiting threads take most of the
    time. If the calling process is killed, the runs end with it, so that it can be started again.

    Raises:
        HashseekError: a process was killed.
        Exception: the first error of any run, after the results of all others.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        running = {pool.submit(function, *run): run for run in runs}
        first: Exception | None = None
        for future in as_completed(running):
            try:
                result = future.result()
            except BrokenProcessPool:
                raise HashseekError(
                    "a run was killed, perhaps because memory ran out: use fewer --jobs; finished runs are kept"
                ) from None
            except Exception as error:
                first = first or error
            else:
                yield running[future], result
    if first is not None:
        raise first


def _end_with_parent() -> None:
    """End this process when its parent does; it would finish its run otherwise, and hold the lock of its folder."""

    def wait() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
