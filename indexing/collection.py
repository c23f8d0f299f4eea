"""A collection: catalog, index and checkpoint in one folder. CLI, service and evaluation all work through it.

catalog.sqlite          all records and codes
checkpoint.safetensors  the model that computed the codes
files/                  images that were uploaded, see `hashseek.indexing.kept_files`
index/                  derived from the catalog; rebuilt if it is missing, damaged or outdated
"""

import logging
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import (
    Catalog,
    CatalogLocked,
    CatalogReplaced,
    Change,
    NewImage,
    StoredImage,
    create_catalog,
)
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.catalog.records import Page, page_of
from hashseek.indexing.index.approximate import APPROXIMATE
from hashseek.indexing.index.code_layouts import Subset
from hashseek.indexing.index.collection_index import CollectionIndex
from hashseek.indexing.index.duplicates import groups
from hashseek.indexing.index.exact_scan import Distances
from hashseek.indexing.index.hamming_index import Ids
from hashseek.indexing.index.segments import View, merged_hits
from hashseek.indexing.kept_files import is_kept, kept_path, with_kept_path
from hashseek.indexing.milvus_uri import refuse_milvus
from hashseek.indexing.uris import is_there
from hashseek.retrieval.checkpoint import Header, check_intact, load_header
from hashseek.retrieval.codes import Codes
from hashseek.retrieval.errors import BadCollection, BadConfig, ForeignCodes, HashseekError
from hashseek.retrieval.files import fsync_folder, locked, sha256_of, write_atomically

if TYPE_CHECKING:
    from hashseek.indexing.milvus.milvus_store import MilvusStore

log = logging.getLogger("hashseek")

CATALOG, CHECKPOINT, INDEX = "catalog.sqlite", "checkpoint.safetensors", "index"
_CACHED_FILTERS = 8


class Limits(TypedDict, total=False):
    """Which images a search may find, and how thoroughly it looks.

    max_distance: distance in bits; images further away are left out. Exact in every kind of index.
    among: a filter that results must match. Exact in every kind of index.
    effort: how thoroughly an approximate index searches, see `HammingIndex.search`; not used with the other two.
    """

    max_distance: int | None
    among: Filter | None
    effort: int | None


class Collection:
    """An open collection. Safe to use from several threads."""

    in_folder = True

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        """Open the collection in `folder`.

        Raises:
            BadCollection: no collection there, damaged, or of another version of Hashseek.
        """
        self.folder = folder
        self.catalog = Catalog(folder / CATALOG, read_only=read_only)
        try:
            self.index = CollectionIndex(folder / INDEX, self.catalog)
        except BaseException:
            self.close()
            raise
        # Answered by the catalog or the index alone.
        catalog, spaces = self.catalog, self.catalog.spaces
        self.place, self.checkpoint = catalog.place, catalog.checkpoint
        self.n_bits, self.fingerprint, self.keeps_features = catalog.n_bits, catalog.fingerprint, catalog.keeps_features
        self.get, self.one, self.by_key, self.ids_where = catalog.get, catalog.one, catalog.by_key, catalog.ids_where
        self.by_content, self.ids_by_key = catalog.by_content, catalog.ids_by_key
        self.records_by_path, self.code_of = catalog.records_by_path, catalog.code_of
        self.update, self.features_of, self.calibration = catalog.update, spaces.features_of, spaces.calibration
        self.check_readable = catalog.generation
        self.merge_segments, self.save_index = self.index.merge_segments, self.index.save
        self.build_index = self.index.build
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._counts: dict[str, tuple[int, dict[str, int]]] = {}  # the generation that was counted, and the result

    def is_current(self) -> bool:
        """False once reopening the folder would open another collection, or the same one with other codes."""
        # While there is no catalog at all, another folder is about to take its place.
        return not self.catalog.path.exists() or self.catalog.is_current()

    def label_counts(self) -> dict[str, int]:
        """Number of images per label, by name; counted once for each state of the collection."""
        return self._counted("labels", self.catalog.label_counts)

    def engines(self) -> dict[str, int]:
        """Number of codes per engine, see `CodeSpaces.engines`; counted once for each state of the collection."""
        return self._counted("engines", self.catalog.spaces.engines)

    def _counted(self, name: str, count: Callable[[], dict[str, int]]) -> dict[str, int]:
        generation = self.catalog.generation()
        with self._counting:  # other requests wait for the result
            if self._counts.get(name, (None,))[0] != generation:
                self._counts[name] = generation, count()
            return dict(self._counts[name][1])

    def close(self) -> None:
        """Close the catalog."""
        self.catalog.close()

    def check_holds_images(self) -> None:
        """Refuse a collection of vectors, which cannot be re-encoded.

        Raises:
            BadCollection: its checkpoint encodes vectors.
        """
        if load_header(self.checkpoint).preprocessing is None:
            raise BadCollection(
                f"{self.folder} stores only the codes of vectors, which cannot be re-encoded: create another "
                "collection from the vectors (`hashseek index add NEW --vectors FILE`)"
            )

    @property
    def kind(self) -> str:
        """The kind of its index, see `CollectionIndex.kind`."""
        return self.index.kind

    @property
    def finds_all(self) -> bool:
        """Whether searches are exact even without a filter or a largest distance."""
        return self.index.current().kind not in APPROXIMATE

    def __len__(self) -> int:
        return len(self.index.current())

    # ------------------------------------------------------------ images

    def add(self, images: list[NewImage]) -> list[tuple[int, Change]]:
        """Store images; returns (id, what changed) for each, see `Catalog.add`. Searches find them at once.

        Kept files that are replaced stay until `optimize`, because a later image may have one of them.
        """
        keyed = self.catalog.ids_by_key([image.key for image in images if image.key is not None])
        records = self.catalog.get(list(keyed.values()))
        stored = {record.key: (record.path, record.sha256) for record in records if record is not None}
        placed: list[NewImage] = []
        for image in images:
            placed.append(with_kept_path(self.folder, image, stored.get(image.key)))
            if image.key is not None:
                stored[image.key] = (placed[-1].path, image.sha256)
        return self.catalog.add(placed)

    def add_with_file(self, image: NewImage, data: bytes, *, suffix: str) -> tuple[int, Change]:
        """Store an image and keep its file, whose content is `data`; returns (id, what changed).

        `image.path` is ignored. The file is not kept if its content is already stored under another path: with the
        same key, or, without a key, in any record. A kept file that it replaces is deleted.
        """
        path = kept_path(image.sha256, suffix)
        before = None
        if image.key is not None and (known := self.catalog.ids_by_key([image.key])):
            before = self.catalog.get([known[image.key]])[0]
        if (
            before is not None
            and before.sha256 == image.sha256
            and not self.owns(before)  # a kept file is written again: another upload may be about to delete it
            and is_there(self.uri_of(before))
        ):
            return self.add([replace(image, path=before.path)])[0]
        self._write_file(path, data)
        try:
            [outcome] = self.add([replace(image, path=path)])
        except (CatalogReplaced, CatalogLocked):
            # Another collection may be in this folder now and use the file; or deleting it would wait for the same
            # lock. `optimize` deletes it.
            raise
        except BaseException:
            self._drop_files({path})
            raise
        stored = self.catalog.get([outcome[0]])[0]
        if stored is not None:
            written = {path, before.path} if before is not None and self.owns(before) else {path}
            self._drop_files(written - {stored.path})
            if stored.path == path and not (self.folder / path).is_file():  # another process removed the same content
                self._write_file(path, data)
        return outcome

    def _write_file(self, path: str, data: bytes) -> None:
        try:
            write_atomically(self.folder / path, data, within=self.folder)
        except FileNotFoundError:  # the folder of the collection was moved
            raise CatalogReplaced(self.catalog.path) from None

    def remove(self, ids: list[int], *, missing_ok: bool = False) -> None:
        """Remove images, all or none, and delete the files that the collection kept of them.

        With `missing_ok`, ids that are not stored are ignored.

        Raises:
            UnknownImage: an id is not stored.
        """
        kept: set[str] = set()
        for start in range(0, len(ids), 1000):  # all records might not fit in memory
            records = self.catalog.get(ids[start : start + 1000])
            kept |= {image.path for image in records if image is not None and self.owns(image)}
        self.catalog.remove(ids, missing_ok=missing_ok)
        self._drop_files(kept)

    def _drop_files(self, paths: set[str]) -> None:
        """Delete kept files, given by the paths of their records, unless an image still has that path.

        A failure is only logged, because the change that made the files superfluous is already stored.
        """
        if not paths:
            return
        try:
            with self.catalog.exclusive():  # or the same content could be stored again just now
                for path in paths - self.catalog.records_by_path(list(paths)).keys():
                    (self.folder / path).unlink(missing_ok=True)
        except (HashseekError, OSError) as error:
            log.warning("files that no image needs were not deleted (`hashseek index optimize` will): %s", error)

    def browse(self, among: Filter | None, *, after: int = 0, offset: int = 0, limit: int) -> Page:
        """At most `limit` records with ids above `after`, without the first `offset`."""
        if among is None:
            n_images = self._counted("images", lambda: {"all": len(self.catalog)})["all"]  # also those without a code
            images = self.catalog.page(after=after, offset=offset, limit=limit + 1)
            return page_of([image.id for image in images], images, limit=limit, total=n_images)
        matching = self.catalog.ids_where(among)
        ids = matching[matching > after][offset : offset + limit + 1].tolist()
        return page_of(ids, self.catalog.get(ids), limit=limit, total=len(matching))

    def owns(self, image: StoredImage) -> bool:
        """Whether the collection itself keeps the image's file."""
        return is_kept(image.path)

    def uri_of(self, image: StoredImage) -> str:
        """Where the image is, for `indexing.uris.open_uri`: a file, a member of a tar, or a URL."""
        return str(self.folder / image.path) if self.owns(image) else image.path

    # ------------------------------------------------------------ searching

    def search(self, query_codes: Codes, *, k: int, **limits: Unpack[Limits]) -> list[tuple[Distances, Ids]]:
        """For each query at most the k nearest: (distances, ids), nearest first, equal distances by ascending id.

        Args:
            query_codes: packed (Q, code_size), of this collection's checkpoint.
            k: at least 1; if larger than the collection, everything is returned.
            limits: see `Limits`.

        Raises:
            BadConfig: an effort that the index does not support.
        """
        view = self.index.current()
        parts = self._hits(view, query_codes, k, limits)
        return [merged_hits(built, fresh, k) for built, fresh in zip(*parts, strict=True)]

    def candidates(self, query_code: Codes, *, n: int, **limits: Unpack[Limits]) -> tuple[Distances, Ids, Codes]:
        """The `n` nearest images and all others at the distance of the last: (distances, ids, packed codes).

        For ranking them by another score. Without `max_distance` and `among`, an approximate index may miss some.

        Args:
            query_code: packed (1, code_size), of this collection's checkpoint.
            n: at least 1.
            limits: see `Limits`.

        Raises:
            BadConfig: see `search`.
        """
        view = self.index.current()
        [built], [fresh] = self._hits(view, query_code, n, limits, ties=True)
        distances, ids = merged_hits(built, fresh, n, ties=True)
        return distances, ids, view.codes_of(ids)

    def histogram(self, query_code: Codes, *, among: Filter | None = None) -> NDArray[np.int64]:
        """How many images have each Hamming distance 0 to K from a packed code (1, code_size): counts (K + 1,).

        Exact in every kind of index: every code is compared.
        """
        view = self.index.current()
        parts = zip((view.built, view.fresh), self._subsets(view, among), strict=True)
        built, fresh = (segment.index.histogram(query_code, among=subset) for segment, subset in parts)
        return built + fresh

    def _hits(
        self, view: View, query_codes: Codes, k: int, limits: Limits, *, ties: bool = False
    ) -> list[list[tuple[Distances, Ids]]]:
        """The results of the built and the fresh segment for each query; with `ties`, all at the distance of the k-th.

        Raises:
            BadConfig: the index does not support `effort`, or not this value.
        """
        max_distance, among, effort = limits.get("max_distance"), limits.get("among"), limits.get("effort")
        if effort is not None and view.kind not in APPROXIMATE:
            raise BadConfig(f"effort is only for approximate indexes, not for kind {view.kind}: leave it out")
        parts = []
        for segment, subset in zip((view.built, view.fresh), self._subsets(view, among), strict=True):
            index = segment.index
            if max_distance is not None or among is not None:
                radius = self.n_bits if max_distance is None else max_distance
                parts.append(index.range(query_codes, radius=radius, k=k, among=subset, ties=ties))
            elif ties:
                parts.append(index.search_ties(query_codes, k=k, among=subset, effort=effort))
            else:
                found = index.search(query_codes, k=k, among=subset, effort=effort)
                parts.append(list(zip(*found, strict=True)))
        return parts

    def _subsets(self, view: View, among: Filter | None) -> list[Subset]:
        """The rows of the built and the fresh segment that may be found; cached for the last few filters."""
        segments = (view.built, view.fresh)
        if among is None:
            return [segment.alive for segment in segments]
        with self._lock:
            if among in view.filtered:
                view.filtered[among] = view.filtered.pop(among)  # the most recently used one comes last
                return view.filtered[among]
        if among.no_labels and among == Filter(no_labels=among.no_labels):  # what does not pass is found faster
            excluded = self.catalog.ids_where(Filter(any_labels=among.no_labels))
            subsets = [segment.all_but(excluded) for segment in segments]
        else:
            ids = self.catalog.ids_where(among)
            subsets = [segment.among(ids) for segment in segments]
        with self._lock:
            view.filtered[among] = subsets
            if len(view.filtered) > _CACHED_FILTERS:
                del view.filtered[next(iter(view.filtered))]
        return subsets

    def duplicates(self, *, radius: int, parallel: bool = True) -> Iterator[Ids]:
        """Groups of images linked by steps of at most `radius` bits, see `indexing.index.duplicates.groups`."""
        return groups(self.index.merged(), radius=radius, parallel=parallel)

    # ------------------------------------------------------------ the index

    def describe_index(self) -> dict[str, Any]:
        """Kind, arrangement, sizes and generation of the index in use."""
        view = self.index.current()
        return view.built.index.describe() | {
            "built": len(view.built.index),
            "fresh": len(view.fresh.index),
            "removed": view.built.n_dead + view.fresh.n_dead,
            "generation": view.generation,
        }

    def verify(self) -> list[str]:
        """Disagreements between catalog, codes, index, checkpoints and image files; empty if there are none.

        Reads every checkpoint and every file that the collection keeps; of other files, only whether they exist.
        """
        problems, is_readable = self.catalog.verify()
        if not is_readable:
            return problems
        problems += self.index.verify()
        for space in self.catalog.spaces.all():
            file = self.folder / space.checkpoint
            try:
                if (found := check_intact(file).fingerprint) != space.fingerprint:
                    problems.append(f"{file} has the fingerprint {found[:12]}, but its codes {space.fingerprint[:12]}")
            except HashseekError as error:
                folder = shlex.quote(str(self.folder))
                remedy = f"copy it from elsewhere: `hashseek index verify {folder} --repair --checkpoint FILE`"
                reason = str(error) if file.is_file() else f"the checkpoint {file} does not exist"
                problems.append(f"{reason}; {remedy}")
        after = 0
        while page := self.catalog.page(after=after, limit=1000):
            suspects = [image for image in page if self._problem_of_file(image)]
            # Read again: another process may have replaced or removed the image together with its file.
            for old, new in zip(suspects, self.catalog.get([image.id for image in suspects]), strict=True):
                if new is not None and new.path == old.path and (message := self._problem_of_file(new)):
                    problems.append(message)
            after = page[-1].id
        return problems

    def _problem_of_file(self, image: StoredImage) -> str | None:
        """The problem with an image's file; None if there is none, or for a vector, which has no file."""
        if not image.path:
            return None
        uri = self.uri_of(image)
        if not is_there(uri):
            return f"the file of image {image.id} does not exist: {image.path!r}"
        try:
            if self.owns(image) and sha256_of(Path(uri)) != image.sha256:
                return f"the content of the file of image {image.id} has changed: {image.path!r}"
        except OSError as error:
            return f"the file of image {image.id} cannot be read: {image.path!r}: {error.strerror}"
        return None


# ---------------------------------------------------------------- opening and creating


def open_or_create(folder: Path, *, checkpoint: Path | None, keep_features: bool = False) -> Collection:
    """Open the collection in `folder`, or create it for the codes of `checkpoint`.

    With `keep_features`, a new collection also stores the features of every image, which `rank = "float"` compares.

    Raises:
        BadCollection: no collection, and no checkpoint to create one for.
        ForeignCodes: the collection was made with another checkpoint.
        BadConfig: `keep_features` is set, but the collection exists and keeps none.
    """
    if not (folder / CATALOG).is_file():
        _create(folder, checkpoint, keep_features=keep_features)
    collection = Collection(folder)
    try:
        if keep_features and not collection.keeps_features:
            raise BadConfig(
                f"{folder} was created without features, so that only later images would have them: leave out "
                "--keep-features, or create a new collection with it"
            )
        if checkpoint is not None:
            check_checkpoint(collection, checkpoint)
    except BaseException:
        collection.close()
        raise
    return collection


def delete_if_unused(collection: Collection) -> None:
    """Delete a collection into which no process has ever stored anything."""
    folder = collection.folder
    with suppress(HashseekError, OSError), locked(folder):  # keeps other processes from creating a collection here
        with collection.catalog.exclusive():  # writers that wait for this find that the file is gone
            if collection.catalog.generation() > 0:
                return
            (folder / CATALOG).unlink()
        collection.close()
        shutil.rmtree(folder / INDEX, ignore_errors=True)
        for path in [*check_place(folder), folder / CHECKPOINT]:
            path.unlink(missing_ok=True)


def _create(folder: Path, checkpoint: Path | None, *, keep_features: bool) -> None:
    """Create an empty collection; if another process was faster, its collection is kept."""
    if checkpoint is None:
        raise BadCollection(
            f"there is no collection in {folder} yet: pass the checkpoint to create it with (--checkpoint), or create "
            "it from images alone with `hashseek index add` or hashseek.create_collection"
        )
    header = load_header(checkpoint)
    if not folder.is_dir():  # an existing folder is checked once it is locked: another process may be creating it
        check_place(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if (folder / CATALOG).is_file():
            return
        for path in check_place(folder):
            path.unlink()
        write_atomically(folder / CHECKPOINT, checkpoint.read_bytes())
        temporary = folder / f"{CATALOG}.new"
        create_catalog(temporary, fingerprint=header.fingerprint, n_bits=header.n_bits, keep_features=keep_features)
        temporary.replace(folder / CATALOG)
        fsync_folder(folder)


def check_place(folder: Path) -> list[Path]:
    """Check that a collection can be created in `folder`; returns the leftovers of an interrupted creation.

    Raises:
        BadCollection: it is a file, contains anything else, or cannot be created.
        BadConfig: it is a Milvus URI.
    """
    refuse_milvus(folder)
    if not folder.exists():
        parent = next(place for place in folder.absolute().parents if place.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            raise BadCollection(f"{folder} cannot be created, because {parent} is not writable: choose another place")
    if folder.exists() and not folder.is_dir():
        raise BadCollection(f"{folder} is a file, not a folder: choose a new or empty folder")
    if (folder / CATALOG).is_file():
        raise BadCollection(f"there is already a collection in {folder}: add to it, or choose a new or empty folder")
    leftovers = [*folder.glob(f".{CHECKPOINT}.*"), *folder.glob(f"{CATALOG}.new*"), *folder.glob(f"{CATALOG}-*")]
    if folder.exists() and set(folder.iterdir()) - {*leftovers, folder / CHECKPOINT}:
        raise BadCollection(f"{folder} is not empty and not a collection: choose a new or empty folder")
    return leftovers


def check_checkpoint(coded: "Catalog | Collection | MilvusStore", checkpoint: Path) -> Header:
    """The header of `checkpoint`, if it computed these codes.

    Raises:
        ForeignCodes: it did not.
    """
    header = load_header(checkpoint)
    if header.fingerprint != coded.fingerprint:
        raise ForeignCodes(
            f"the collection {coded.place} holds codes of checkpoint {coded.fingerprint[:12]} "
            f"({coded.n_bits} bits), not of {header.fingerprint[:12]} ({header.n_bits} bits); their distances are "
            "meaningless: use the collection's own checkpoint, or index into a new collection"
        )
    return header
