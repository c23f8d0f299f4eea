"""The index files of a collection: each index has a folder of its own, and the catalog names the one that is used.

An index is complete on disk before the catalog names it, and never changes afterwards, so that readers need no lock.
"""

import json
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.index import gpu
from hashseek.indexing.index.hamming_index import KINDS, MAPPED, load_index, save_index
from hashseek.indexing.index.segments import View, empty_segment, whole
from hashseek.retrieval.errors import BadCollection
from hashseek.retrieval.files import sha256_of


def usable_kind(kind: str) -> str:
    """The kind itself, but exact for gpu without a GPU, and for a kind that was removed: they have the same files."""
    return "exact" if kind not in KINDS or (kind == "gpu" and not gpu.is_available()) else kind


class NoIndex(BadCollection):
    """No index of these codes has been written yet, which is normal: in a small new collection, or after a switch."""


@dataclass(frozen=True)
class SavedIndex:
    """An index on disk, as the catalog describes it.

    Args:
        folder: its name.
        space: the id of the code space whose codes it has.
        generation: the generation of the catalog when it was read for the index.
        last_id: the highest id in the catalog then.
        kind: one of `hamming_index.KINDS`.
        sha256: the hashes of its files, by name.
    """

    folder: str
    space: int
    generation: int
    last_id: int
    kind: str
    sha256: dict[str, str]


@dataclass(frozen=True)
class IndexFiles:
    """The folders of indexes in `place`, for the codes with which `catalog` was opened."""

    place: Path
    catalog: Catalog

    def saved(self) -> SavedIndex | None:
        """The index that the catalog names; None if it names none, or the description is damaged."""
        with suppress(ValueError, TypeError, AttributeError):
            saved = SavedIndex(**json.loads(self.catalog.saved_index() or "{}"))
            # A generation that is still to come would hide all changes up to it.
            if saved.sha256.keys() and saved.last_id >= 0 and saved.generation <= self.catalog.generation():
                return saved
        return None

    def load(self, *, read_all: bool = False) -> tuple[View, SavedIndex]:
        """Load the index. Files that are mapped (`hamming_index.MAPPED`) are compared with their hashes if `read_all`.

        Raises:
            BadCollection: missing, damaged, or for other codes.
        """
        while True:
            saved = self.saved()
            if saved is None:
                raise NoIndex("none has been written yet")
            if saved.space != self.catalog.space.id:
                raise NoIndex("it belongs to the code space that was used before the last switch")
            try:
                return self._load(saved, read_all=read_all), saved
            except BadCollection:
                if saved == self.saved():  # otherwise another process has replaced it just now
                    raise

    def write(self, view: View) -> SavedIndex:
        """Write the index of a merged view in place of the present one. Hold the lock of the collection's folder.

        Raises:
            OSError: no space or no permission; the present index is kept.
            BadCollection: the catalog cannot be changed; the present index is kept.
        """
        self._delete_all_but(self.saved())  # first, because folders of killed processes take up space
        index, folder = view.built.index, self.place / secrets.token_hex(8)
        try:
            sha256 = {file.name: sha256_of(file) for file in save_index(index, folder)}
            space = self.catalog.space.id
            saved = SavedIndex(folder.name, space, view.generation, view.last_id, index.kind, sha256)
            self.catalog.set_saved_index(json.dumps(asdict(saved)))
        except BaseException:
            named = self.saved()  # Ctrl-C may come after the catalog has named it
            if named is None or named.folder != folder.name:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._delete_all_but(saved)
        return saved

    def _load(self, saved: SavedIndex, *, read_all: bool) -> View:
        n_bits = self.catalog.n_bits
        try:
            files = {self.place / saved.folder / name: sha256 for name, sha256 in saved.sha256.items()}
            for file, sha256 in files.items():
                if (read_all or file.stat().st_size < MAPPED) and sha256_of(file) != sha256:
                    raise BadCollection(f"{file.name} does not match its hash in the catalog")
            index = load_index(files, n_bits=n_bits, kind=usable_kind(saved.kind))
        except (OSError, TypeError, ValueError) as error:
            raise BadCollection(f"it cannot be read: {error}") from None
        return View(saved.generation, saved.last_id, whole(index), empty_segment(n_bits))

    def _delete_all_but(self, kept: SavedIndex | None) -> None:
        """Delete all other folders of indexes."""
        for path in self.place.glob("*"):
            if kept is None or path.name != kept.folder:
                shutil.rmtree(path, ignore_errors=True)  # it may be another user's
