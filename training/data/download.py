"""Fetching a public archive and unpacking it: resumed after a cut, checked, and never half of a file under its name."""

import fcntl
import hashlib
import http.client
import re
import shutil
import ssl
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.files import write_atomically
from hashseek.retrieval.label_files import OnError
from hashseek.training.data.image_table import Incomplete
from hashseek.training.data.splits import Splits
from hashseek.training.runs.progress import Progress

_TRIES = 5
_TIMEOUT = 60.0  # seconds without a byte
_BLOCK = 2**20
# What the network does to a download; an OSError that is none of them is the disk's.
_INTERRUPTIONS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)
_LATER = frozenset((408, 425, 429, 500, 502, 503, 504))  # answers that another try may change


@dataclass(frozen=True)
class Archive:
    """A public .tar or .zip file.

    md5: as its makers or torchvision publish it. None: nobody does, so the SHA-256 of the first download is kept beside
    the archive and later downloads are compared with it.
    into: folder below the data set's root that it is unpacked into.
    """

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
    """What `read(on_error)` gives; if files are missing and `download` is set, after fetching the archives.

    Raises:
        BadDataset: as `read` says, or the archives cannot be had.
    """
    if download:
        try:
            return read("stop")
        except Incomplete:
            progress = Progress()
            for archive in archives:
                unpack(fetch(archive, root, progress=progress), root / archive.into, progress=progress)
        except BadDataset:
            pass  # nothing that a download mends
    return read(on_error)


def fetch(archive: Archive, folder: Path, *, progress: Progress, pause: float = 2.0) -> Path:
    """The archive in `folder`, downloaded if it is not there; a download that was cut off goes on where it stopped.

    `pause` seconds pass before the second try, twice as many before each further one.

    Raises:
        BadDataset: no connection after some tries, no such file, or another checksum than the known one.
    """
    file, part = folder / archive.name, folder / f"{archive.name}.part"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as target, _alone(target, archive.url):
            for attempt in range(_TRIES):
                try:
                    _download(archive.url, target, part, progress)
                    break
                except _INTERRUPTIONS as error:
                    reason = _refusal(error, archive.url, part)
                    if attempt == _TRIES - 1:
                        raise BadDataset(
                            f"{archive.url} cannot be downloaded ({reason}): run the same command again, it goes on "
                            f"after the {part.stat().st_size:,} bytes in {part}, or put it by hand in {file}"
                        ) from None
                    progress.console.print(f"download interrupted ({reason}): trying again", markup=False)
                    time.sleep(pause * 2**attempt)
            _verify(part, archive, progress, remove=True)
            part.replace(file)
        _validator(part).unlink(missing_ok=True)
    else:
        _verify(file, archive, progress, remove=False)
    return file


@contextmanager
def _alone(target: IO[bytes], url: str) -> Iterator[None]:
    try:
        fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadDataset(f"another process is downloading {url}: wait until it is done") from None
    yield


def _download(url: str, target: IO[bytes], part: Path, progress: Progress) -> None:
    """Append what is missing to `target`, or start over if the server has another file now or cannot resume."""
    request = urllib.request.Request(url, headers={"User-Agent": "hashseek", "Accept-Encoding": "identity"})
    have = part.stat().st_size
    validator = _validator(part)
    if have:
        request.add_header("Range", f"bytes={have}-")
        if validator.is_file():  # a file that has changed since is then sent whole
            request.add_header("If-Range", validator.read_text())
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{have}":
            return  # it was complete, and only its name is still missing
        if error.code == 416:
            target.truncate(0)
        raise
    with response:
        if response.status != 206 or not _starts_at(response.headers.get("Content-Range"), have):
            target.truncate(0)
            have = 0
        mark = response.headers.get("ETag", "")
        mark = response.headers.get("Last-Modified", "") if not mark or mark.startswith("W/") else mark
        if mark:
            write_atomically(validator, mark.encode())
        length = response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        _refuse_full_disk(part.parent, 0 if total is None else total - have, url)
        with progress.task(f"downloading {part.stem}, MiB", 0 if total is None else total // _BLOCK) as advance:
            done = have
            advance(done // _BLOCK)
            try:
                while block := response.read1(_BLOCK):
                    target.write(block)
                    advance((done + len(block)) // _BLOCK - done // _BLOCK)
                    done += len(block)
            finally:
                target.flush()  # the next try asks the file how far this one came
    if total is not None and done != total:  # reading does not say that the connection was cut
        raise ConnectionResetError(f"cut off after {done:,} of {total:,} bytes")


def _validator(part: Path) -> Path:
    return part.with_name(f"{part.name}.version")


def _starts_at(content_range: str | None, have: int) -> bool:
    return content_range is not None and re.match(rf"bytes {have}-", content_range) is not None


def _refusal(error: Exception, url: str, part: Path) -> str:
    """Why a try failed, if another one may succeed.

    Raises:
        BadDataset: it never will.
    """
    if isinstance(error, urllib.error.HTTPError):
        if error.code not in (*_LATER, 416):
            raise BadDataset(
                f"{url} cannot be downloaded: the server answers {error.code} {error.reason}; get the archive by hand "
                f"and put it there as {part.with_suffix('')}"
            ) from None
        return f"the server answers {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def _refuse_full_disk(folder: Path, needed: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BadDataset(
            f"{what} needs {needed / 2**30:.1f} GiB in {folder}, where {free / 2**30:.1f} GiB are free: make room or "
            "choose another root"
        )


def _verify(file: Path, archive: Archive, progress: Progress, *, remove: bool) -> None:
    """Compare with the known checksum; if there is none, with that of the first download, which is recorded."""
    record = file.with_name(f"{archive.name}.sha256")
    if archive.md5 is None and not record.is_file():
        write_atomically(record, f"{_digest(file, 'sha256')}  {archive.name}\n".encode())
        progress.console.print(
            f"note: no checksum of {archive.name} is published; that of this copy is kept in {record}", markup=False
        )
        return
    known = archive.md5 or record.read_text().split()[0]
    found = _digest(file, "md5" if archive.md5 else "sha256")
    if found != known:
        origin = "published" if archive.md5 else f"recorded in {record}"
        if remove:
            file.unlink()
            remedy = "it was removed, download it again"
        else:
            remedy = "delete it, so that it is downloaded again"
        raise BadDataset(f"{file} from {archive.url} has the checksum {found}, not {known} as {origin}: {remedy}")


def _digest(file: Path, kind: str) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, kind).hexdigest()


# --- unpacking -----------------------------------------------------------------------------------------------


def unpack(archive: Path, folder: Path, *, progress: Progress) -> None:
    """Unpack what is not in `folder` yet, or not in its full size: an interrupted unpacking is completed.

    Raises:
        BadDataset: the archive is damaged, names a place outside `folder`, or there is too little space.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed_zip:
                sizes = {info.filename: info.file_size for info in packed_zip.infolist() if not info.is_dir()}
                _extract(sizes, folder, archive, lambda name: packed_zip.extract(name, folder), progress)
        else:
            with tarfile.open(archive) as packed_tar:
                members = {member.name: member for member in packed_tar.getmembers() if member.isfile()}
                sizes = {name: member.size for name, member in members.items()}
                _extract(
                    sizes,
                    folder,
                    archive,
                    lambda name: packed_tar.extract(members[name], folder, filter="data"),
                    progress,
                )
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise BadDataset(f"{archive} is damaged ({error}): delete it and download it again") from None


def _extract(
    sizes: dict[str, int], folder: Path, archive: Path, extract: Callable[[str], Any], progress: Progress
) -> None:
    for name in sizes:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BadDataset(f"{archive} holds {name!r}, a place outside {folder}: it is not the official archive")
    missing = [name for name, size in sizes.items() if not _has_size(folder / name, size)]
    _refuse_full_disk(folder, sum(sizes[name] for name in missing), str(archive))
    with progress.task(f"unpacking {archive.name}, files", len(missing)) as advance:
        for name in missing:
            extract(name)
            advance(1)


def _has_size(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except OSError:
        return False
