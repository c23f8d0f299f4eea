"""Choosing which names of attributes have an index, while others search and change the collection."""

import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hashseek.indexing.catalog import attributes
from hashseek.indexing.catalog.database import Database
from hashseek.retrieval.errors import HashseekError

_PAUSE_SECONDS = 0.3
# Names that came, or went, while others were counted are counted in the next round; the next `optimize` does the rest.
_ROUNDS = 5


def choose_attributes(path: Path) -> None:
    """Where some names of attributes may have no index, index those that most images have now.

    Making one reads every image, which takes seconds, and keeps writers waiting: so each is made in a transaction of
    its own, and names are counted without keeping anybody waiting. After each step all that is noted is true.
    """
    with closing(Database(path, read_only=False)) as database:
        for _ in range(_ROUNDS):
            with database.transaction() as db:
                mark = attributes.watch(db)
            if mark is None:
                return
            with database.snapshot() as db:
                counts = attributes.count_names(db)
                to_drop, to_make = attributes.to_change(db, counts or Counter())  # damaged: none until they are mended
            for name in to_drop:
                with _step(database) as db:
                    attributes.drop(db, name)
            for name in to_make:
                with _step(database) as db:
                    attributes.make(db, name)
            if counts is None or len(counts) > attributes.MOST:
                return
            with database.transaction() as db:
                if attributes.settle(db, mark, counts):
                    return


def choose_if_possible(path: Path) -> str | None:
    """`choose_attributes` after work that stands without it; a sentence if it failed."""
    try:
        choose_attributes(path)
    except (HashseekError, OSError) as error:
        return (
            f"some attributes may have no index, so that conditions on them are slow ({error}): "
            "`hashseek index optimize` makes them"
        )
    return None


@contextmanager
def _step(database: Database) -> Iterator[sqlite3.Connection]:
    """A transaction, and time for those who waited for its end: SQLite knows no queue, they look again every 0.1 s."""
    started = time.monotonic()
    with database.transaction() as db:
        yield db
    time.sleep(min(_PAUSE_SECONDS, time.monotonic() - started))
