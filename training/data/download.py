"""Downloads and unpacks the public archives of a data set; called by the data sets that have `download = true`."""

import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hashseek.retrieval.download import download as download_file
from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.label_files import OnError
from hashseek.training.data.image_table import Incomplete, with_remedy
from hashseek.training.data.splits import Splits


@dataclass(frozen=True)
class Archive:
    """A public .tar or .zip file, its MD5 where one is published, and the folder below the root to unpack it into."""

    url: str
    md5: str | None
    into: str = "."

    @property
    def name(self) -> str:
        """Its file name."""
        return self.url.rpartition("/")[2]


def read_or_download(
    read: Callable[[OnError], Splits], archives: Sequence[Archive], root: Path, *, download: bool, on_error: OnError
) -> Splits:
    """Call `read(on_error)`; if files are missing or damaged and `download` is set, download the archives first.

    Raises:
        BadDataset: raised by `read`, or the archives cannot be downloaded.
    """
    if download:
        try:
            return read("stop")
        except Incomplete:
            for archive in archives:
                unpack(fetch(archive, root), root / archive.into)
    with with_remedy(f"unpack {' and '.join(a.url for a in archives)} in {root}, or set download = true"):
        return read(on_error)


def fetch(archive: Archive, folder: Path) -> Path:
    """Download the archive into `folder` unless it exists, and check its MD5. A partial download is resumed.

    Raises:
        BadDataset: it cannot be downloaded or saved, or has a wrong checksum.
    """
    file = folder / archive.name
    try:
        download_file(archive.url, file, digest=archive.md5)
    except OSError as error:  # including no connection, and a full disk
        raise BadDataset(
            f"{archive.url} cannot be downloaded to {folder} ({error}): run the same command again to resume it, or "
            f"save the archive as {file}"
        ) from None
    return file


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .zip or .tar file; existing files are replaced.

    Raises:
        BadDataset: the archive is damaged, holds a path outside `folder`, or cannot be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # Both refuse or leave out ".." and leading slashes in names.
        shutil.unpack_archive(archive, folder, filter=None if archive.suffix == ".zip" else "data")
    except (shutil.ReadError, tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise BadDataset(f"{archive} is damaged or unsafe ({error}): delete it and download it again") from None
    except OSError as error:
        raise BadDataset(f"{archive} cannot be unpacked into {folder}: {error.strerror or error}") from None
