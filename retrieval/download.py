"""Downloads large files: published weights, and the archives of public data sets.

An interrupted download is resumed, which neither torch.hub nor pooch can do: one archive of COCO has 13 GB.
"""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

_TIMEOUT = 60.0  # seconds without a byte
_BLOCK = 2**20


def download(url: str, file: Path, *, algorithm: str = "md5", digest: str | None = None) -> None:
    """Download `url` to `file` unless it is there; a bar on a terminal shows the progress.

    The file appears when it is complete. If another process is downloading it, this one waits.

    Args:
        url: the URL of the file.
        file: where it is kept; a partial download is `file`.part.
        algorithm: the hash algorithm of the digest, such as "sha256".
        digest: the beginning of the hexadecimal digest of the content; None: unknown.

    Raises:
        OSError: it cannot be downloaded or saved, is cut off, or has another digest.
    """
    part = file.with_name(f"{file.name}.part")
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(f".{file.name}.lock")):
        if file.is_file():
            return
        try:
            _complete(url, part)
        except urllib.error.HTTPError as error:
            error.close()
            raise
        except urllib.error.URLError as error:
            raise ConnectionError(str(error.reason)) from None
        except http.client.HTTPException as error:
            raise ConnectionError(f"the answer is not HTTP: {error}") from None
        if digest is not None:
            with part.open("rb") as content:
                found = hashlib.file_digest(content, algorithm).hexdigest()
            if not found.startswith(digest):
                part.unlink()
                raise OSError(f"the download is damaged: its {algorithm} is {found}, not {digest}")
        part.replace(file)


def _complete(url: str, part: Path) -> None:
    """Append the missing bytes to `part`, or write it from the start if the server cannot resume."""
    have = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "hashseek", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers=headers | ({"Range": f"bytes={have}-"} if have else {}))
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:
            error.close()
            part.unlink()  # it is at least as long as the file, so it may be another one
            _complete(url, part)
            return
        raise
    console = Console(stderr=True)
    columns = TextColumn("downloading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with (
        response,
        part.open("ab") as target,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        if response.status != 206:
            have = 0
            target.truncate(0)
        length = response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        task = bar.add_task(part.stem, total=total, completed=have)
        while block := response.read1(_BLOCK):
            target.write(block)
            have += len(block)
            bar.update(task, completed=have)
        target.flush()
        os.fsync(target.fileno())
    if total is not None and have != total:  # a connection that is cut off raises no error
        raise ConnectionError(f"cut off after {have:,} of {total:,} bytes")
