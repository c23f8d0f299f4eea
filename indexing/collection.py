"""A collection: catalog, index and checkpoint in one folder.

    catalog.sqlite          the truth
    checkpoint.safetensors  the model whose codes it holds
    files/                  images that were uploaded rather than pointed to
    index/                  derived from the catalog; deleted, torn or stale ones are rebuilt

Searches see one immutable view: a built segment, a small fresh one for what came since, and which rows were removed.
A change makes a new view; nobody waits for it but the next search. `Collection.merge_segments` takes the fresh segment
into the built one when it has grown; who runs for long calls it now and then, and searches do not wait for it.
"""

import logging
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hashseek.indexing.catalog import Catalog, Change, NewImage, StoredImage, create_catalog
from hashseek.indexing.catalog.filters import Chosen, Filter
from hashseek.indexing.catalog.records import Changes
from hashseek.indexing.index.duplicates import groups
from hashseek.indexing.index.hamming_index import APPROXIMATE, Distances, HammingIndex, Ids, Subset, check_kind
from hashseek.indexing.index.index_files import IndexFiles, Written
from hashseek.indexing.index.segments import Segment, View, empty, joined, merge, merged_hits
from hashseek.indexing.ingest.uris import is_there
from hashseek.retrieval.checkpoint import Header, load_header
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.errors import BadCollection, BadConfig, ForeignCodes, HashseekError
from hashseek.retrieval.files import fsync_folder, locked, write_atomically

log = logging.getLogger("hashseek")

CATALOG, CHECKPOINT, FILES, INDEX = "catalog.sqlite", "checkpoint.safetensors", "files", "index"
_FILTERS = 8  # whose answers are kept until something changes


class Collection:
    """An open collection. Safe to use from several threads."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        """Open the collection in `folder`.

        Raises:
            BadCollection: no collection there, damaged, or of a newer Hashseek.
        """
        self.folder = folder
        self.catalog = Catalog(folder / CATALOG, read_only=read_only)
        self._lock = threading.Lock()
        self._chosen: OrderedDict[Filter, tuple[View, list[Subset]]] = OrderedDict()
        self._files = IndexFiles(folder / INDEX, self.catalog)
        self._saved: Written | None = None  # what is on disk, and the same in memory
        self._saved_index: weakref.ref[HammingIndex] | None = None
        self._doomed: Written | None = None  # what was on disk when writing over it failed
        self._runs = {"exact"}  # kinds that this machine can run
        try:
            self._view = self._open_index(read_only=read_only)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the catalog."""
        self.catalog.close()

    @property
    def n_bits(self) -> int:
        """K, the length of the codes."""
        return self.catalog.n_bits

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the checkpoint that made the codes."""
        return self.catalog.fingerprint

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that the collection keeps."""
        return self.folder / self.catalog.space.checkpoint

    @property
    def kind(self) -> str:
        """The kind that its index is to have, as it was last built; exact where this machine cannot run that."""
        kind = self.catalog.index_kind() or self._files.kind() or "exact"
        if kind not in self._runs:
            with suppress(BadConfig):
                empty(self.n_bits, kind)
                self._runs.add(kind)
        return kind if kind in self._runs else "exact"

    def __len__(self) -> int:
        return len(self._current())

    def add(self, images: list[NewImage], *, replaced: set[str] | None = None) -> list[tuple[int, Change]]:
        """Store images; (id, what became of it) for each, see `Catalog.add`. They can be found when this returns.

        A path that leads to a file which the collection itself keeps is stored as such, see `under_kept_path`. Kept
        files that are replaced are deleted, or added to `replaced` for `drop_files`: who reads ahead may have met them.
        """
        keyed = self.catalog.known_keys([image.key for image in images if image.key is not None])
        before = [image for image in self.catalog.get(list(keyed.values())) if image is not None]
        placed = self._placed(images, before)
        outcome = self.catalog.add(placed)
        # Another process may have replaced, and deleted, what was kept a moment ago. The last of a key counts.
        moved = {put.key: (given, put) for given, put in zip(images, placed, strict=True) if put.key is not None}
        lost = [
            given
            for given, put in moved.values()
            if given.path != put.path and not is_there(str(self.folder / put.path)) and is_there(given.path)
        ]
        if lost:
            self.catalog.add(lost)
        paths = {image.path for image in before if self.owns(image)}
        if replaced is None:
            self.drop_files(paths)
        else:
            replaced |= paths
        return outcome

    def _placed(self, images: list[NewImage], before: list[StoredImage]) -> list[NewImage]:
        """The images under the paths by which they are stored, one after the other; `before`: records of their keys."""
        stored = {image.key: (image.path, image.sha256) for image in before}
        placed: list[NewImage] = []
        for image in images:
            placed.append(under_kept_path(self.folder, image, stored.get(image.key)))
            if image.key is not None:
                stored[image.key] = (placed[-1].path, image.sha256)
        return placed

    def remove(self, ids: list[int], *, missing_ok: bool = False) -> None:
        """Forget images, all or none, and delete the files that the collection itself kept of them.

        With `missing_ok`, those of them that are there.

        Raises:
            UnknownImage: an id is not there.
        """
        stored = self.catalog.get(ids) if missing_ok else [self.catalog.one(image_id) for image_id in ids]
        self.catalog.remove(ids, missing_ok=missing_ok)
        self.drop_files({image.path for image in stored if image is not None and self.owns(image)})

    def search(
        self,
        query_codes: Codes,
        *,
        k: int,
        max_distance: int | None = None,
        among: Ids | Filter | None = None,
        effort: int | None = None,
    ) -> list[tuple[Distances, Ids]]:
        """For each query the at most k nearest: (distances, ids), nearest first, ties by ascending id.

        Args:
            query_codes: packed (Q, code_size), of this collection's checkpoint.
            k: at least 1; a larger k than the collection gives all of it.
            max_distance: leave out what is further away (bits); what is left is exact in every kind of index.
            among: what may be found: ids in any order, or a filter; exact in every kind of index.
            effort: of an approximate index, see `HammingIndex.search`; with `max_distance` or `among` it is not needed.

        Raises:
            BadConfig: an effort that the index does not know, or a filter that cannot be asked.
        """
        view = self._current()
        if effort is not None and view.kind not in APPROXIMATE:
            raise BadConfig(f"an index of kind {view.kind} is exact and takes no effort: leave it out")
        parts: list[Sequence[tuple[Distances, Ids]]] = []
        for segment, chosen in zip((view.built, view.fresh), self._among(view, among), strict=True):
            if max_distance is not None or among is not None:
                radius = self.n_bits if max_distance is None else max_distance
                parts.append(segment.index.range(query_codes, radius=radius, k=k, among=chosen))
                continue
            of_segment = effort if segment is view.built else None
            distances, ids = segment.index.search(query_codes, k=k, among=chosen, effort=of_segment)
            parts.append(list(zip(distances, ids, strict=True)))
        return [merged_hits(built, fresh, k) for built, fresh in zip(*parts, strict=True)]

    def _among(self, view: View, among: Ids | Filter | None) -> list[Subset]:
        """What may be found, of the built and of the fresh segment; of the last few filters it is remembered."""
        segments = (view.built, view.fresh)
        if not isinstance(among, Filter):
            chosen = None if among is None else Chosen(among)
            return [segment.among(chosen) for segment in segments]
        with self._lock:
            of_view, subsets = self._chosen.get(among, (None, []))
            if of_view is view:
                self._chosen.move_to_end(among)
                return subsets
        chosen = self.catalog.choose(among)
        subsets = [segment.among(chosen) for segment in segments]
        with self._lock:
            self._chosen[among] = view, subsets
            self._chosen.move_to_end(among)
            for key in [key for key, (of_view, _) in self._chosen.items() if of_view is not self._view]:
                del self._chosen[key]  # or it would keep an old view in memory
            while len(self._chosen) > _FILTERS:
                self._chosen.popitem(last=False)
        return subsets

    def owns(self, image: StoredImage) -> bool:
        """Whether the collection itself keeps the image's file."""
        return is_kept(image.path)

    def uri_of(self, image: StoredImage) -> str:
        """Where the image is, as `indexing.ingest.uris.open_uri` reads it: a file, a member of a tar, an address."""
        return str(self.folder / image.path) if self.owns(image) else image.path

    def file_of(self, image: StoredImage) -> Path:
        """Where the image's file is, or was when it was added."""
        return self.folder / image.path if self.owns(image) else Path(image.path)

    def add_with_file(self, image: NewImage, data: bytes, *, suffix: str) -> tuple[int, Change]:
        """Store an image and its file's content `data`, whatever `image.path` says; (id, what became of it).

        No file is kept of content that is stored from elsewhere already: under the same key, or, without one, at all.
        """
        path = f"{FILES}/{image.sha256[:2]}/{image.sha256}{suffix}"
        stored = None
        if image.key is not None and (known := self.catalog.known_keys([image.key])):
            stored = self.catalog.get([known[image.key]])[0]
        if stored is not None and stored.sha256 == image.sha256 and is_there(self.uri_of(stored)):
            return self.add([replace(image, path=stored.path)])[0]
        write_atomically(self.folder / path, data)
        try:
            [outcome] = self.add([replace(image, path=path)])
        except BaseException:
            self.drop_files({path})
            raise
        stored = self.catalog.get([outcome[0]])[0]
        if stored is not None and stored.path != path:  # somebody stored the same content from elsewhere
            self.drop_files({path})
        elif stored is not None and not (self.folder / path).is_file():  # somebody removed the same content
            write_atomically(self.folder / path, data)
        return outcome

    def merge_segments(self) -> bool:
        """Take what changed into the built index, if that pays by now; others search and change meanwhile.

        Returns:
            Whether it did.
        """
        kind = self.kind
        if self._view.kind != kind:  # another process was told to build another kind, and may have done so
            self._take_over(kind)
        view = self._current()
        due = view.is_due or view.kind != kind
        if due:
            self._install(replace(view, built=merge(view, self.n_bits, kind), fresh=empty(self.n_bits)))
        return due

    def save_index(self) -> None:
        """Merge all segments and write the index, so that the next start need not read all codes.

        What another process wrote since this one was opened is taken over.
        """
        while self.catalog.is_current():  # otherwise the index on disk is of other codes than these
            kind = self.kind
            on_disk = self._take_over(kind)
            view = self._current()
            # An approximate index is written when it was built anew; what changed since is read from the catalog.
            rests = kind in APPROXIMATE and self._is_saved(view) and not view.is_due
            saved = self._saved if on_disk is not None and view.kind == kind else None
            if saved is not None and (rests or view.generation == saved.generation):
                return
            if self._write(view, merge(view, self.n_bits, kind), over=(on_disk, self._saved)):
                return

    def build_index(self, kind: str) -> None:
        """Build an index of this kind (`hamming_index.KINDS`) over all images and write it; it stays of this kind.

        All codes are read from the catalog: nothing of the index that was there is trusted.

        Raises:
            BadConfig: there is no such kind, or not on this machine.
        """
        check_kind(kind)
        view = self._advance(View(-1, 0, empty(self.n_bits), empty(self.n_bits)))
        merged = merge(view, self.n_bits, kind)
        self.catalog.set_index_kind(kind)
        self._write(view, merged)

    def _take_over(self, kind: str) -> Written | None:
        """Search what another process has written as the index, if it is of this kind; which index is on disk now."""
        with locked(self.folder, shared=True):
            on_disk = self._files.written()
            if on_disk in (None, self._saved, self._doomed) or on_disk.kind != kind:
                return on_disk
            try:
                built = self._load()
            except BadCollection:
                self._saved = None
                return on_disk
        self._install(built)
        return on_disk

    def _write(self, view: View, merged: Segment, *, over: Container[Written | None] | None = None) -> bool:
        """Search and write what a view holds, unless an index is on disk that `over` does not have; whether it did."""
        self._install(replace(view, built=merged, fresh=empty(self.n_bits)))
        with locked(self.folder):  # two processes at once would mix their files
            if not self.catalog.is_current():  # the index on disk is that of the space that will be opened next
                return True
            on_disk = self._files.written()
            if over is not None and on_disk not in over:
                return False
            self._saved, self._doomed = None, on_disk  # if it fails, what is there is torn, or at least older
            self._saved = self._files.write(merged.index, generation=view.generation, last_id=view.last_id)
            self._saved_index, self._doomed = weakref.ref(merged.index), None
        return True

    def _is_saved(self, view: View) -> bool:
        """Whether what is on disk is the built index of a view."""
        return self._saved_index is not None and self._saved_index() is view.built.index

    def _load(self) -> View:
        """The index on disk; `BadCollection` if it cannot be trusted."""
        view, self._saved = self._files.load()
        self._saved_index = weakref.ref(view.built.index)
        return view

    def duplicates(self, *, radius: int) -> Iterator[Ids]:
        """Groups of images linked by steps of at most `radius` bits, see `hashseek.indexing.index.duplicates.groups`.

        Raises:
            BadConfig: radius is below 0, or not below the length of the codes.
        """
        return groups(merge(self._current(), self.n_bits, "exact").index, radius=radius)

    def describe_index(self) -> dict[str, Any]:
        """Kind, how its codes are arranged, sizes and generation of the view that searches see now."""
        view = self._current()
        return view.built.index.describe() | {
            "built": len(view.built.index),
            "fresh": len(view.fresh.index),
            "removed": view.built.n_dead + view.fresh.n_dead,
            "generation": view.generation,
        }

    def verify(self) -> list[str]:
        """What does not agree between catalog, codes, index, checkpoint and files; empty if all is well."""
        problems = self.catalog.integrity_problems()
        if any(problem.startswith("SQLite: ") for problem in problems):  # whatever else it says cannot be relied on
            return problems
        view = self._current()
        truth = self.catalog.changes(after_id=0, after_generation=-1)
        spare = 8 * truth.codes.shape[1] - self.n_bits
        if spare and len(truth.codes) and int(truth.codes[:, -1].max()) >> (8 - spare):
            problems.append(f"a code has bits set beyond its {self.n_bits} bits")
        index = merge(view, self.n_bits, "exact").index
        if not self._agree(index, view, truth):
            problems.append(
                f"the index in memory holds {len(index)} images that differ from the catalog's {len(truth.ids)}"
            )
        # Otherwise there is no index on disk, or one of other codes: others have switched since this was opened.
        if self._files.exist() and self.catalog.is_current():
            try:
                with locked(self.folder, shared=True):
                    self._files.load()
            except BadCollection as error:
                if self._files.exist() and self.catalog.is_current():  # otherwise somebody was at it just now
                    problems.append(f"the index on disk will be rebuilt: {error}")
        try:
            check_checkpoint(self.catalog, self.checkpoint)
        except HashseekError as error:
            problems.append(str(error))
        after = 0
        while page := self.catalog.page(after=after, limit=1000):
            gone = [image for image in page if not is_there(self.uri_of(image))]
            # Looked at again: somebody may have replaced or removed the image, and its file with it.
            now = self.catalog.get([image.id for image in gone])
            problems += [
                f"the file of image {old.id} is gone: {old.path!r}"
                for old, new in zip(gone, now, strict=True)
                if new is not None and new.path == old.path and not is_there(self.uri_of(old))
            ]
            after = page[-1].id
        return problems

    def _agree(self, index: HammingIndex, view: View, truth: Changes) -> bool:
        """Whether an index over a view holds what the catalog does, but for what others changed since."""
        changed = np.zeros(0, np.int64)
        if truth.generation != view.generation:
            since = self.catalog.changes(after_id=view.last_id, after_generation=view.generation)
            if since.whole:  # nothing that the view knows counts any more
                return True
            changed = np.concatenate([since.ids, since.removed])
        of_index, of_truth = ~np.isin(index.ids, changed), ~np.isin(truth.ids, changed)
        same = np.array_equal(index.ids[of_index], truth.ids[of_truth])
        return same and np.array_equal(index.codes[of_index], truth.codes[of_truth])

    def drop_files(self, paths: set[str]) -> None:
        """Delete files that the collection kept, named as records name them, unless an image still points to them."""
        if not paths:
            return
        with self.catalog.exclusive():  # or the same content could be stored again just now
            for path in paths - self.catalog.paths_in_use(paths):
                try:
                    (self.folder / path).unlink(missing_ok=True)
                except OSError as error:
                    log.warning("a file that no image needs any more could not be deleted: %s", error)

    def _current(self) -> View:
        """The view, brought up to date with whatever was committed, by us or by another process."""
        view, generation = self._view, self.catalog.generation()
        if generation == view.generation:
            return view
        with self._lock:
            if self._view.generation < generation:
                self._view = self._advance(self._view)
            return self._view

    def _advance(self, view: View) -> View:
        changes = self.catalog.changes(after_id=view.last_id, after_generation=view.generation)
        if changes.whole:
            view = View(-1, 0, empty(self.n_bits, view.kind), empty(self.n_bits))
        built, fresh = view.built.without(changes.removed), view.fresh.without(changes.removed)
        if len(changes.ids):
            fresh = joined([fresh], self.n_bits, "exact", changes.codes, changes.ids)
        last_id = max(view.last_id, int(changes.ids[-1])) if len(changes.ids) else view.last_id
        advanced = View(changes.generation, last_id, built, fresh)
        # Nothing is there that could be searched meanwhile; an approximate index takes too long, and is due.
        if changes.whole and advanced.is_due and advanced.kind not in APPROXIMATE:
            advanced = replace(advanced, built=merge(advanced, self.n_bits, advanced.kind), fresh=empty(self.n_bits))
        return advanced

    def _install(self, view: View) -> None:
        """Search a view from now on, with what has changed since."""
        view = self._advance(view)  # without the lock: it may be much
        with self._lock:
            self._view = self._advance(view) if view.generation < self._view.generation else view

    def _open_index(self, *, read_only: bool) -> View:
        try:
            with locked(self.folder, shared=True):  # or another process could exchange files that were checked
                built = self._load()
        except BadCollection as error:
            if len(self.catalog):
                log.warning("the index of %s is rebuilt from the catalog: %s", self.folder, str(error))
            built = View(-1, 0, empty(self.n_bits, self.kind), empty(self.n_bits))
            if not read_only:
                self._distrust()
        return self._advance(built)

    def _distrust(self) -> None:
        """Delete a manifest that is not of this catalog as it is now, so that no later state can make it look right."""
        with suppress(OSError, BadCollection), locked(self.folder):  # nobody fails to open for want of this
            # Another process may have written an index just now, or have switched to the codes that it is of.
            if self._files.written() is None and self.catalog.is_current():
                kind = self._files.kind()
                if kind in APPROXIMATE and self.catalog.index_kind() is None:  # built before catalogs kept it
                    self.catalog.set_index_kind(kind)
                self._files.distrust()


def is_kept(path: str) -> bool:
    """Whether a record's path is of a file that its collection itself keeps."""
    return path.startswith(f"{FILES}/") and ".." not in Path(path).parts  # or it could be anywhere


def under_kept_path(folder: Path, image: NewImage, stored: tuple[str, str] | None) -> NewImage:
    """An image under the path by which the collection in `folder` stores it: `files/...` if it keeps that file.

    Otherwise the file would be deleted as one that was replaced: a list or an export may name it, by another name of
    the folder, too. So content that is kept stays where it is, wherever else it is said to be.

    Args:
        folder: of the collection.
        image: that is to be stored.
        stored: path and content hash that the record of its key has now, if there is one.
    """
    if stored is not None and is_kept(stored[0]) and stored[1] == image.sha256 and is_there(str(folder / stored[0])):
        return replace(image, path=stored[0])
    name = f"{FILES}/{image.sha256[:2]}/{image.sha256}"
    above, found, suffix = image.path.rpartition(f"/{name}")
    if found and re.fullmatch(r"(\.\w{1,8})?", suffix) and os.path.realpath(above) == os.path.realpath(folder):
        return replace(image, path=name + suffix)
    return image


def open_or_create(folder: Path, *, checkpoint: Path | None) -> Collection:
    """Open the collection in `folder`, or create it for the codes of `checkpoint`.

    Raises:
        BadCollection: no collection and no checkpoint to create one for.
        ForeignCodes: the collection was made with another checkpoint.
    """
    if not (folder / CATALOG).is_file():
        _create(folder, checkpoint)
    collection = Collection(folder)
    if checkpoint is not None:
        try:
            check_checkpoint(collection.catalog, checkpoint)
            _mend_checkpoint(collection, checkpoint)
        except BaseException:
            collection.close()
            raise
    return collection


def _mend_checkpoint(collection: Collection, checkpoint: Path) -> None:
    """Copy `checkpoint` again if the collection's own copy was lost or damaged."""
    try:
        check_checkpoint(collection.catalog, collection.checkpoint)
    except HashseekError:
        write_atomically(collection.checkpoint, checkpoint.read_bytes())


def _create(folder: Path, checkpoint: Path | None) -> None:
    """Create an empty collection; if another process was faster, its collection stays."""
    if checkpoint is None:
        raise BadCollection(
            f"there is no collection {folder} yet: name the checkpoint to create it with (--checkpoint)"
        )
    header = load_header(checkpoint)
    header.image_preprocessing()  # refuses a model of vectors
    if not folder.is_dir():  # a folder is looked at when it is locked: another process may be at it
        check_place(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if (folder / CATALOG).is_file():
            return
        leftovers = check_place(folder)
        for path in leftovers:
            path.unlink()
        write_atomically(folder / CHECKPOINT, checkpoint.read_bytes())
        temporary = folder / f"{CATALOG}.new"
        create_catalog(temporary, fingerprint=header.fingerprint, n_bits=header.n_bits)
        temporary.replace(folder / CATALOG)
        fsync_folder(folder)


def check_place(folder: Path) -> list[Path]:
    """The leftovers in `folder` of a creation that was interrupted; nothing else may be where a collection is created.

    Raises:
        BadCollection: it is a file, or holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise BadCollection(f"{folder} is a file, not a folder: choose a new or an empty folder")
    leftovers = [*folder.glob(f".{CHECKPOINT}.*"), *folder.glob(f"{CATALOG}.new*")]
    if folder.exists() and set(folder.iterdir()) - {*leftovers, folder / CHECKPOINT}:
        raise BadCollection(f"{folder} is not empty and not a collection: choose a new or an empty folder")
    return leftovers


def check_checkpoint(catalog: Catalog, checkpoint: Path) -> Header:
    """The header of `checkpoint`, if it made the catalog's codes.

    Raises:
        ForeignCodes: it did not; the message names both fingerprints.
    """
    header = load_header(checkpoint)
    if header.fingerprint != catalog.fingerprint:
        raise ForeignCodes(
            f"the collection {catalog.path.parent} holds codes of checkpoint {catalog.fingerprint[:12]} "
            f"({catalog.n_bits} bits), not of {header.fingerprint[:12]} ({header.n_bits} bits): distances between them "
            "mean nothing; use the collection's own checkpoint or index into a new collection"
        )
    return header
