"""The index files of a collection, and a manifest with their hashes and the state of the catalog that they belong to.

Hold the lock of the collection's folder to read or write them, or files of two processes would mix.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.index.hamming_index import MAPPED, load_index, save_index
from hashseek.indexing.index.segments import View, empty, whole
from hashseek.retrieval.errors import BadCollection, BadConfig
from hashseek.retrieval.files import checksum_of, fsync_folder, sha256_of, write_atomically

_MANIFEST = "manifest.json"


class OldIndex(BadCollection):
    """The index on disk has the codes from before the last switch; it is rebuilt, and nothing is wrong."""


@dataclass(frozen=True)
class IndexVersion:
    """The kind of a written index, and the generation of the catalog that it belongs to."""

    generation: int
    kind: str


@dataclass(frozen=True)
class IndexFiles:
    """The files in `folder` of an index over the codes with which `catalog` was opened."""

    folder: Path
    catalog: Catalog

    def exist(self) -> bool:
        """Whether there is a manifest."""
        return (self.folder / _MANIFEST).exists()

    def version(self) -> IndexVersion | None:
        """The content of the manifest; None if there is none that fits the catalog."""
        with suppress(BadCollection):
            return _version(self._manifest())
        return None

    def load(self, *, read_all: bool = False) -> tuple[View, IndexVersion]:
        """Load the index, if its files match the manifest and the manifest matches the catalog.

        Files that are mapped (`hamming_index.MAPPED`) are compared with their hashes only with `read_all`.

        Raises:
            BadCollection: missing, damaged, of another catalog, or of a kind that this machine does not support.
        """
        manifest = self._manifest()
        with _as_bad_collection():
            version, n_bits = _version(manifest), self.catalog.n_bits
            files = {self.folder / name: sha256 for name, sha256 in manifest["sha256"].items()}
            for file, sha256 in files.items():
                if (read_all or file.stat().st_size < MAPPED) and sha256_of(file) != sha256:
                    raise BadCollection(f"{file.name} does not match the hash in its manifest")
            index = load_index(files, n_bits=n_bits, kind=version.kind)
            if len(index) != manifest["n_images"]:
                raise BadCollection(f"its files hold {len(index)} images, but its manifest {manifest['n_images']}")
            return View(version.generation, manifest["last_id"], whole(index), empty(n_bits)), version

    def write(self, view: View) -> IndexVersion:
        """Write the index of a merged view; it replaces the present one.

        Raises:
            OSError: no space or no permission; the present index is kept, or is no longer used.
        """
        for leftover in self.folder.glob(".*"):  # of a process that was killed while writing
            if not leftover.is_dir():
                leftover.unlink()
        if any(file.stat().st_size >= MAPPED for file in self.folder.glob("*")):
            self.delete_manifest()  # hashes are not compared, so half of the new files could pass for the old ones
        index = view.built.index
        files = save_index(index, self.folder)
        manifest = self._origin() | {
            "generation": view.generation,
            "last_id": view.last_id,
            "n_images": len(index),
            "kind": index.kind,
            "sha256": {file.name: sha256_of(file) for file in files},
        }
        # The manifest comes last: one that does not match the files next to it is not trusted.
        content = json.dumps(manifest | {"checksum": checksum_of(manifest)}, indent=2)
        write_atomically(self.folder / _MANIFEST, content.encode())
        for other in {*self.folder.iterdir()} - {*files, self.folder / _MANIFEST}:  # of an earlier kind or format
            if other.is_file():
                other.unlink()
        return _version(manifest)

    def delete_manifest(self) -> None:
        """Delete the manifest."""
        (self.folder / _MANIFEST).unlink(missing_ok=True)
        fsync_folder(self.folder)

    def _origin(self) -> dict[str, Any]:
        """What the manifest of a usable index must contain."""
        return {
            "catalog": self.catalog.uuid,
            "space": self.catalog.space.id,
            "fingerprint": self.catalog.fingerprint,
            "n_bits": self.catalog.n_bits,
        }

    def _manifest(self) -> dict[str, Any]:
        """The manifest, if it is complete and fits the catalog as it is now."""
        with _as_bad_collection():
            manifest: dict[str, Any] = json.loads((self.folder / _MANIFEST).read_text(encoding="utf-8"))
            if manifest["checksum"] != checksum_of(manifest):
                raise BadCollection("its manifest does not match its own checksum")
            if manifest["space"] != self.catalog.space.id and manifest["catalog"] == self.catalog.uuid:
                raise OldIndex("it belongs to the code space that was used before the last switch")
            for key, value in self._origin().items():
                if manifest[key] != value:
                    raise BadCollection(f"its manifest has {key} {manifest[key]!r}, but the catalog {value!r}")
            if manifest["generation"] > self.catalog.generation():
                raise BadCollection("it is newer than the catalog, which was probably restored from a copy")
            return manifest


@contextmanager
def _as_bad_collection() -> Iterator[None]:
    """Raise what goes wrong with an index file as `BadCollection`."""
    try:
        yield
    except BadConfig as error:  # this machine does not support its kind
        raise BadCollection(str(error)) from None
    except FileNotFoundError as error:
        raise BadCollection(f"{error.filename} is missing") from None
    # SystemError: Python 3.11 raises it where several threads parse literals at once, as NumPy does with headers.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SystemError) as error:
        raise BadCollection(f"it cannot be read: {error}") from None


def _version(manifest: dict[str, Any]) -> IndexVersion:
    return IndexVersion(manifest["generation"], manifest["kind"])
