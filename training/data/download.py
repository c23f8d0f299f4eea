"""Downloads and unpacks the public archives of a data set; called by the data sets that have `download = true`.

An interrupted download is resumed, which neither pooch nor torchvision can do: one archive of COCO has 13 GB.
"""

import hashlib
import http.client
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.label_files import OnError
from hashseek.training.data.image_table import Incomplete, with_remedy
from hashseek.training.data.splits import Splits
from hashseek.training.runs.progress import Progress

_TIMEOUT = 60.0  # seconds without a byte
_BLOCK = 2**20


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
            progress = Progress()
            for archive in archives:
                unpack(fetch(archive, root, progress=progress), root / archive.into)
        except BadDataset:
            pass  # a download would not help
    with with_remedy(f"unpack {' and '.join(a.url for a in archives)} in {root}, or set download = true"):
        return read(on_error)


def fetch(archive: Archive, folder: Path, *, progress: Progress) -> Path:
    """Download the archive into `folder` unless it is there, and check its MD5. A partial download is resumed.

    Another process that downloads the same archive is waited for.

    Raises:
        BadDataset: it cannot be downloaded or saved, or has a wrong checksum.
    """
    file, part = folder / archive.name, folder / f"{archive.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{archive.name}.lock"):
            if not file.is_file():
                _download(archive.url, part, progress)
                part.replace(file)
            if archive.md5 is not None:
                _check_md5(archive, file)
    except (OSError, http.client.HTTPException) as error:  # also no connection, and a full disk
        raise BadDataset(
            f"{archive.url} cannot be downloaded to {folder} ({error}): run the same command again to resume it, or "
            f"save the archive as {file}"
        ) from None
    return file


def _check_md5(archive: Archive, file: Path) -> None:
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "md5").hexdigest()
    if found != archive.md5:
        file.unlink()
        raise BadDataset(
            f"{archive.url} has the MD5 {found}, not the published {archive.md5}: the file was removed, so run the "
            "same command again"
        )


def _download(url: str, part: Path, progress: Progress) -> None:
    """Append to `part` what it lacks, or write it from the start where the server cannot resume."""
    have = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "hashseek", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers=headers | ({"Range": f"bytes={have}-"} if have else {}))
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:
            part.unlink()  # it is as long as the archive or longer, so it may be another one
            _download(url, part, progress)
            return
        raise
    with response, part.open("ab") as target:
        if response.status != 206:
            have = 0
            target.truncate(0)
        length = response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        with progress.task(f"downloading {part.stem}, MiB", (total or 0) // _BLOCK) as advance:
            while block := response.read1(_BLOCK):
                target.write(block)
                advance((have + len(block)) // _BLOCK - have // _BLOCK)
                have += len(block)
    if total is not None and have != total:  # a connection that is cut off raises no error
        raise ConnectionError(f"cut off after {have:,} of {total:,} bytes")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .zip or .tar file; files that are there already are replaced.

    Raises:
        BadDataset: the archive is damaged, holds a path outside `folder`, or cannot be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # Both refuse or leave out ".." and leading slashes in names.
        shutil.unpack_archive(archive, folder, filter=None if archive.suffix == ".zip" else "data")
    except (shutil.ReadError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise BadDataset(f"{archive} is damaged or unsafe ({error}): delete it and download it again") from None
    except OSError as error:
        raise BadDataset(f"{archive} cannot be unpacked into {folder}: {error.strerror or error}") from None
