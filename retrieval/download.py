"""Downloads large files: pretrained weights, and the archives of public data sets.

An interrupted download is resumed, which neither torch.hub nor pooch can do: one archive of COCO has 13 GB.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from hashseek.retrieval.errors import first_line

if TYPE_CHECKING:
    from httpx import Response

_TIMEOUT = 60.0  # seconds without a byte


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
        _complete(url, part)
        if digest is not None:
            with part.open("rb") as content:
                found = hashlib.file_digest(content, algorithm).hexdigest()
            if not found.startswith(digest):
                part.unlink()
                raise OSError(f"the download is damaged: its {algorithm} is {found}, not {digest}")
        part.replace(file)


def _complete(url: str, part: Path) -> None:
    """Append the missing bytes to `part`, or write it from the start if the server cannot resume."""
    import httpx  # slow to import, and rarely needed

    have = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "hashseek", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    tls = ssl.create_default_context()  # with the certificates of the system, to which companies add their own
    try:
        with httpx.stream("GET", url, headers=headers, timeout=_TIMEOUT, follow_redirects=True, verify=tls) as response:
            has_nothing_more = have and response.status_code == 416
            if not has_nothing_more:
                _append(response.raise_for_status(), part)
    # The last three mean that the proxy is unknown to httpx, such as ALL_PROXY=socks://127.0.0.1:1080.
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as error:
        raise ConnectionError(first_line(error)) from None
    if has_nothing_more:  # `part` is at least as long as the file, so it may be another one
        part.unlink()
        _complete(url, part)


def _append(response: Response, part: Path) -> None:
    """Write the body to the end of `part`, or to a new one if it is the whole file."""
    resumed = response.status_code == 206
    console = Console(stderr=True)
    columns = TextColumn("downloading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with (
        part.open("ab" if resumed else "wb") as target,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        length = response.headers.get("Content-Length")
        total = None if length is None else target.tell() + int(length)
        task = bar.add_task(part.stem, total=total, completed=target.tell())
        for block in response.iter_raw():
            target.write(block)
            bar.advance(task, len(block))
        target.flush()
        os.fsync(target.fileno())
