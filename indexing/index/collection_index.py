"""The index of an open collection: what its searches see, kept up to date with the catalog and written to disk.

Searches use a `View` of one state. The next search after a change makes a new view; those that start in the meantime
wait for it, and those that are running keep theirs. Images added since the built segment was created are in a small
fresh segment, until `merge_segments` or `save` merges the two.
"""

import errno
import logging
import os
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np

from hashseek.indexing.catalog import Catalog, CatalogLocked, DiskFull
from hashseek.indexing.index.hamming_index import SLOW_TO_BUILD, HammingIndex
from hashseek.indexing.index.index_files import IndexFiles, NoIndex, SavedIndex, usable_kind
from hashseek.indexing.index.segments import View, empty_view, joined, merge
from hashseek.retrieval.errors import BadCollection
from hashseek.retrieval.files import locked

log = logging.getLogger("hashseek")

_TRIES = 20  # to compare index and catalog in the same state, while other processes change the catalog


class CollectionIndex:
    """The index over the codes with which `catalog` was opened. Safe to use from several threads.

    Args:
        files: the folder of its files.
        catalog: the catalog of the collection.

    Raises:
        BadCollection: a code in the catalog is damaged.
    """

    def __init__(self, files: Path, catalog: Catalog) -> None:
        self._folder = catalog.folder
        self._catalog = catalog
        self._n_bits = catalog.n_bits
        self._files = IndexFiles(files, catalog)
        self._lock = threading.Lock()
        self._saved: SavedIndex | None = None  # the one that is both on disk and in memory
        self._saved_index: weakref.ref[HammingIndex] | None = None
        self._view = self._open()

    @property
    def kind(self) -> str:
        """The kind that the index should have, see `usable_kind`."""
        return usable_kind(self._catalog.index_kind())

    def current(self) -> View:
        """The view, updated with everything that this or another process has committed."""
        view, generation = self._view, self._catalog.generation()
        if generation == view.generation:
            return view
        with self._lock:
            if self._view.generation < generation:
                self._view = self._advance(self._view)
            return self._view

    def merged(self) -> HammingIndex:
        """An exact index over all images."""
        return merge(self.current(), "exact").built.index

    def merge_segments(self) -> None:
        """Load an index that another process has written, and merge the fresh segment into the built one if it is due.

        Others can search and change the index meanwhile.
        """
        kind = self.kind
        self._load_newer(kind)
        view = self.current()
        if view.is_due or view.kind != kind:
            self._install(merge(view, kind))

    def save(self) -> None:
        """Merge all segments and write the index, so that the next process does not have to read all codes.

        If another process has written a newer index, that one is loaded instead.
        """
        while self._catalog.is_current():  # otherwise the index on disk is for other codes than these
            kind = self.kind
            on_disk = self._load_newer(kind)
            view = self.current()
            if on_disk is not None and on_disk == self._saved and self._is_saved(view) and view.kind == kind:
                # Such an index is written when it is rebuilt; later changes are read from the catalog.
                is_enough = kind in SLOW_TO_BUILD and not view.is_due
                if is_enough or view.generation == on_disk.generation:
                    return
            merged = merge(view, kind)
            self._install(merged)
            with locked(self._folder):
                if self._files.saved() == on_disk:  # otherwise another process has just written one
                    self._write(merged)
                    return

    def build(self, kind: str | None = None) -> None:
        """Build an index from the catalog alone and write it.

        Args:
            kind: one of `hamming_index.KINDS`, which the collection then keeps; None: `self.kind`.

        Raises:
            BadConfig: there is no such kind, or this machine does not support it.
        """
        view = merge(self._advance(empty_view(self._n_bits)), kind or self.kind)
        if kind is not None:
            self._catalog.set_index_kind(kind)
        self._install(view)
        with locked(self._folder):
            self._write(view)

    def verify(self) -> list[str]:
        """Compare the index in memory and on disk with the catalog."""
        problems = []
        for _ in range(_TRIES):
            view, stored = self.current(), self._catalog.all_codes()
            if stored.generation == view.generation:
                index = merge(view, "exact").built.index
                if not (np.array_equal(index.ids, stored.ids) and np.array_equal(index.codes, stored.codes)):
                    problems.append(
                        f"the index with {len(index)} images differs from the catalog with {len(stored.ids)}"
                    )
                break
        try:
            self._files.load(read_all=True)
        except NoIndex:
            pass
        except BadCollection as error:
            problems.append(f"the index on disk will be rebuilt: {error}")
        return problems

    def _advance(self, view: View) -> View:
        """A view with everything that the catalog has committed since."""
        changes = self._catalog.changes(after_id=view.last_id, after_generation=view.generation)
        if changes.is_complete:
            view = empty_view(self._n_bits, view.kind)
        built, fresh = view.built.without(changes.removed), view.fresh.without(changes.removed)
        if len(changes.ids):
            fresh = joined([fresh.left(), (changes.codes, changes.ids)], n_bits=self._n_bits)
        last_id = max(view.last_id, int(changes.ids[-1])) if len(changes.ids) else view.last_id
        advanced = View(changes.generation, last_id, built, fresh)
        # Merged at once when everything is new, unless that takes long: then its merge stays due.
        if changes.is_complete and advanced.is_due and advanced.kind not in SLOW_TO_BUILD:
            advanced = merge(advanced, advanced.kind)
        return advanced

    def _install(self, view: View) -> None:
        """Use a view from now on, updated with what has changed since."""
        view = self._advance(view)  # without the lock: it may take a long time
        with self._lock:
            self._view = self._advance(view) if view.generation < self._view.generation else view

    def _open(self) -> View:
        try:
            built = self._load()
        except BadCollection as error:
            if len(self._catalog):
                level = logging.INFO if isinstance(error, NoIndex) else logging.WARNING
                log.log(level, "the index of %s is rebuilt from the catalog: %s", self._folder, str(error))
            built = empty_view(self._n_bits, self.kind)
        return self._advance(built)

    def _load_newer(self, kind: str) -> SavedIndex | None:
        """Load an index that another process has written, if it has this kind; returns what is on disk now."""
        on_disk = self._files.saved()
        if on_disk not in (None, self._saved) and on_disk.kind == kind:
            with suppress(BadCollection):  # it will be overwritten
                self._install(self._load())
        return on_disk

    def _write(self, view: View) -> None:
        """Write a merged view. The caller holds the lock of the folder, so that there is one writer at a time."""
        if not self._catalog.is_current():  # the index on disk is for the code space that is opened next
            return
        remedy = "only the index could not be written: check free space and permissions, and run the command again"
        try:
            self._saved = self._files.write(view)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror or error}; {remedy}", str(self._files.place)) from None
        except DiskFull:  # its message says that the change was not stored
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}; {remedy}", str(self._files.place)) from None
        except CatalogLocked as error:
            raise CatalogLocked(f"only the index could not be written: {error}") from None
        self._saved_index = weakref.ref(view.built.index)

    def _is_saved(self, view: View) -> bool:
        """Whether the index on disk is the built segment of a view."""
        return self._saved_index is not None and self._saved_index() is view.built.index

    def _load(self) -> View:
        """The index on disk; `BadCollection` if it cannot be used."""
        view, self._saved = self._files.load()
        self._saved_index = weakref.ref(view.built.index)
        return view
