"""The index of a collection on disk: derived files, of which a manifest says what they are, byte by byte.

Whoever reads or writes them holds the lock of the collection's folder, or files of two processes would mix.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hashseek.indexing.catalog import Catalog
from hashseek.indexing.index.hamming_index import HammingIndex, load_index, save_index
from hashseek.indexing.index.segments import View, empty, whole
from hashseek.retrieval.errors import BadCollection, BadConfig
from hashseek.retrieval.files import write_atomically

_MANIFEST, _CODES, _IDS = "manifest.json", "codes.faiss", "ids.bin"


@dataclass(frozen=True)
class Written:
    """Which index was written: of which kind, and of which generation of the catalog."""

    generation: int
    kind: str


@dataclass(frozen=True)
class IndexFiles:
    """The files in `folder` of an index over the codes that `catalog` was opened on."""

    folder: Path
    catalog: Catalog

    def exist(self) -> bool:
        """Whether something is there that claims to be an index."""
        return (self.folder / _MANIFEST).exists()

    def written(self) -> Written | None:
        """What the manifest claims; None if there is none that can be trusted."""
        with suppress(BadCollection):
            return _written(self._manifest())
        return None

    def kind(self) -> str | None:
        """The kind that the manifest names, of whichever codes of this catalog; None if there is none that says it."""
        with suppress(BadCollection):
            manifest = self._read()
            if manifest["catalog"] == self.catalog.uuid:
                return _written(manifest).kind
        return None

    def load(self) -> tuple[View, Written]:
        """The index, if every byte of it is what its manifest says, and the manifest is this catalog's.

        Raises:
            BadCollection: it is missing, torn, of something else, or of a kind that this machine cannot run.
        """
        manifest = self._manifest()
        try:
            for name in {_CODES, _IDS, *manifest["sha256"]}:
                if _sha256(self.folder / name) != manifest["sha256"][name]:
                    raise BadCollection(f"{name} is not the file that its manifest describes")
            ids, n_bits = np.fromfile(self.folder / _IDS, np.int64), self.catalog.n_bits
            written = _written(manifest)
            segment = whole(load_index(self.folder / _CODES, ids, n_bits=n_bits, kind=written.kind))
            return View(written.generation, manifest["last_id"], segment, empty(n_bits)), written
        except BadConfig as error:  # of a kind that this machine cannot run
            raise BadCollection(str(error)) from None
        except FileNotFoundError as error:
            raise BadCollection(f"{error.filename} is missing") from None
        # SystemError: Python 3.11 raises it where several threads parse literals at once, as NumPy does with headers.
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SystemError) as error:
            raise BadCollection(f"it cannot be read: {error}") from None

    def write(self, index: HammingIndex, *, generation: int, last_id: int) -> Written:
        """Write an index over the images up to `last_id` as of a generation of the catalog, over the one that is there.

        Raises:
            OSError: no room, or not allowed; the one that was there stays, or is trusted no more, but for its kind.
        """
        for leftover in self.folder.glob(".*"):  # of a process that was killed while it wrote
            if not leftover.is_dir():
                leftover.unlink()
        files = save_index(index, self.folder / _CODES)
        write_atomically(self.folder / _IDS, index.ids.tobytes())
        files.append(self.folder / _IDS)
        manifest = self._origin() | {
            "generation": generation,
            "last_id": last_id,
            "n_images": len(index),
            "kind": index.kind,
            "sha256": {file.name: _sha256(file) for file in files},
        }
        # Written last: a manifest that does not match the files beside it is not trusted.
        content = json.dumps(manifest | {"checksum": _checksum(manifest)}, indent=2)
        write_atomically(self.folder / _MANIFEST, content.encode())
        for other in set(self.folder.glob(f"{Path(_CODES).stem}.*.npz")) - set(files):  # of a kind that it was before
            other.unlink()
        return Written(generation, index.kind)

    def distrust(self) -> None:
        """Delete the manifest."""
        (self.folder / _MANIFEST).unlink(missing_ok=True)

    def _origin(self) -> dict[str, Any]:
        """What an index must be of."""
        return {
            "catalog": self.catalog.uuid,
            "space": self.catalog.space.id,
            "fingerprint": self.catalog.fingerprint,
            "n_bits": self.catalog.n_bits,
        }

    def _manifest(self) -> dict[str, Any]:
        """The manifest, if it is whole and of this catalog as it is now."""
        manifest = self._read()
        try:
            if manifest["space"] != self.catalog.space.id and manifest["catalog"] == self.catalog.uuid:
                raise BadCollection("it is of the codes that were used before the last switch of models")
            for key, value in self._origin().items():
                if manifest[key] != value:
                    raise BadCollection(f"its manifest has {key} {manifest[key]!r}, the catalog {value!r}")
            if manifest["generation"] > self.catalog.generation():
                raise BadCollection("it is newer than the catalog, which must have been restored from a copy")
            return manifest
        except (KeyError, TypeError) as error:
            raise BadCollection(f"it cannot be read: {error}") from None

    def _read(self) -> dict[str, Any]:
        """The manifest, if it is whole."""
        try:
            manifest: dict[str, Any] = json.loads((self.folder / _MANIFEST).read_text(encoding="utf-8"))
            if manifest.pop("checksum") != _checksum(manifest):
                raise BadCollection("its manifest does not match its own checksum")
            manifest.setdefault("space", 1)  # the first collections had one
            return manifest
        except FileNotFoundError as error:
            raise BadCollection(f"{error.filename} is missing") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadCollection(f"it cannot be read: {error}") from None


def _written(manifest: dict[str, Any]) -> Written:
    return Written(manifest["generation"], manifest.get("kind", "exact"))  # the first manifests did not say


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
