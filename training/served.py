"""The served truth: the query split through a running service, beside the library on the same collection."""

import hashlib
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from retrieval.checkpoint import load_checkpoint
from retrieval.errors import BadConfig, BadDataset, ForeignCodes
from retrieval.images import read_bytes
from retrieval.metrics import Normalizer, average_precision_of_ranking, effective_n, relevance
from training.datasets.splits import Split, Splits
from training.progress import Progress

_SECONDS = 120  # to wait for one answer
_PAGE = 1000  # stored images in one answer, the most that a service gives
_SHOWN = 3  # examples in a sentence
_T = TypeVar("_T")


@dataclass(frozen=True)
class Agreement:
    """What service and library gave: mAP@N of both by N, and a sentence for each query whose rankings differ."""

    url: str
    fingerprint: str
    n_queries: int
    n_images: int
    figures: dict[int, tuple[float, float]]
    differences: list[str]
    notes: list[str]

    def as_markdown(self) -> str:
        """A table of the figures, and every difference."""
        equal = self.n_queries - len(self.differences)
        lines = [
            f"# {self.url} beside the library",
            "",
            f"{equal} of {self.n_queries} queries have the same ranking (ids and distances), over {self.n_images} "
            f"stored images of checkpoint {self.fingerprint[:12]}.",
            "",
            "| N | mAP@N, service | mAP@N, library | difference |",
            "|---:|---:|---:|---:|",
        ]
        lines += [f"| {n} | {a:.6f} | {b:.6f} | {a - b:+.6f} |" for n, (a, b) in self.figures.items()]
        for title, items in (("Differences", self.differences), ("Notes", self.notes)):
            if items:
                lines += ["", f"## {title}", "", *(f"- {item}" for item in items)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Stats:
    fingerprint: str


@dataclass(frozen=True)
class _Stored:
    id: int
    sha256: str
    path: str


@dataclass(frozen=True)
class _Page:
    images: list[_Stored]
    next: int | None


@dataclass(frozen=True)
class _Hit:
    id: int
    distance: int


@dataclass(frozen=True)
class _Hits:
    fingerprint: str
    hits: list[_Hit]


def check_service(
    url: str,
    checkpoint_path: Path,
    splits: Splits,
    *,
    data_name: str,
    ns: Sequence[int | None] = (100, 1000, 5000),
    normalizer: Normalizer = "retrieved",
    device: str = "auto",
    precision: str = "auto",
    progress: Progress | None = None,
) -> Agreement:
    """Search a service with every query, and rank the same images with the library.

    The service must hold the database split, each content once, as it stores them; equal distances go by its ids.
    Relevance is that of the splits on both sides.

    Args:
        url: of the service. checkpoint_path, splits, data_name, ns, normalizer, device, precision, progress: see
            `training.evaluate.evaluate`; `precision` has to be that of the service for codes to be equal to the bit.

    Raises:
        ForeignCodes: the service has codes of another checkpoint.
        BadDataset: it does not hold the images of the database split, or holds others.
        BadConfig: it does not answer, or not as a Hashseek service, or refuses a query; N < 1.
    """
    from training.evaluate import rankings, usable  # late: it loads FAISS

    for n in ns:
        effective_n(n, 1)
    progress = progress or Progress(quiet=True)
    url = url.rstrip("/")
    checkpoint = load_checkpoint(checkpoint_path)
    fingerprint = checkpoint.header.fingerprint
    if checkpoint.header.preprocessing is None or splits.query.vectors is not None:
        raise BadConfig(
            "a service searches with images: --url needs a checkpoint and a data set of images, not vectors"
        )
    _check_fingerprint(url, _ask(f"{url}/v1/stats", _Stats).fingerprint, fingerprint)
    query, database, notes = usable(splits, data_name, progress)
    ids, database, copies = _as_stored(url, database)
    if copies:
        notes.append(
            f"{copies} database images are copies of others: a service stores each content once, so they count once"
        )
    limits = list(dict.fromkeys(effective_n(n, len(database)) for n in ns))
    k = max(limits)

    row_of = {image_id: row for row, image_id in enumerate(ids)}
    served = np.full((len(query), k), -1), np.full((len(query), k), -1)
    with progress.task("asking the service", len(query)) as advance:
        for place, path in enumerate(query.paths):
            answer = _search(url, path, k)
            _check_fingerprint(url, answer.fingerprint, fingerprint)
            for rank, hit in enumerate(answer.hits[:k]):
                served[0][place, rank], served[1][place, rank] = hit.distance, row_of.get(hit.id, -1)
            advance(1)
    found = rankings(checkpoint, query, database, k=k, device=device, precision=precision, progress=progress)

    n_relevant = np.array([database.labels[:, row > 0].any(axis=1).sum() for row in query.labels])
    figures = {}
    for n in limits:
        both = []
        for rows in (served[1], found[1]):
            hits = relevance(rows[:, :n], query.labels, database.labels) & (rows[:, :n] >= 0)
            both.append(float(average_precision_of_ranking(hits, n_relevant=n_relevant, normalizer=normalizer).mean()))
        figures[n] = both[0], both[1]
    differences = _differences(query, database, served, found)
    return Agreement(url, fingerprint, len(query), len(database), figures, differences, notes)


def _as_stored(url: str, database: Split) -> tuple[list[int], Split, int]:
    """Ids of the stored images, the database split in their order, and how many copies it has without."""
    row_of: dict[str, int] = {}
    for row, path in enumerate(database.paths):
        row_of.setdefault(hashlib.sha256(read_bytes(path)).hexdigest(), row)
    stored: list[_Stored] = []
    after: int | None = 0
    while after is not None:
        page = _ask(f"{url}/v1/images?limit={_PAGE}&after={after}", _Page)
        stored += page.images
        after = page.next
    held = {image.sha256 for image in stored}
    missing = [database.paths[row].name for sha256, row in row_of.items() if sha256 not in held]
    foreign = [image.path for image in stored if image.sha256 not in row_of]
    if missing or foreign:
        parts = [f"{_few(missing)} missing"] * bool(missing) + [f"{_few(foreign)} not in the split"] * bool(foreign)
        raise BadDataset(
            f"the collection of {url} is not the database split: {' and '.join(parts)}: index that split alone with "
            "`hashseek index add`"
        )
    stored.sort(key=lambda image: image.id)
    rows = [row_of[image.sha256] for image in stored]
    return [image.id for image in stored], database.take(rows), len(database) - len(rows)


def _differences(
    query: Split,
    database: Split,
    served: tuple[NDArray[np.int64], NDArray[np.int64]],
    found: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> list[str]:
    """A sentence for each query whose (distances, rows) differ."""
    unlike = (served[0] != found[0]) | (served[1] != found[1])

    def told(answer: tuple[NDArray[np.int64], NDArray[np.int64]], place: int, rank: int) -> str:
        distance, row = int(answer[0][place, rank]), int(answer[1][place, rank])
        if distance < 0:
            return "nothing"
        name = "an image that was not there before" if row < 0 else database.paths[row].name
        return f"{name} at {distance} bits"

    sentences = []
    for place in np.flatnonzero(unlike.any(axis=1)).tolist():
        rank = int(unlike[place].argmax())
        sentences.append(
            f"{query.paths[place].name}: {int(unlike[place].sum())} of {unlike.shape[1]} ranks differ, first rank "
            f"{rank + 1}: the service gives {told(served, place, rank)}, the library {told(found, place, rank)}"
        )
    return sentences


def _check_fingerprint(url: str, theirs: str, ours: str) -> None:
    if theirs != ours:
        raise ForeignCodes(
            f"the service {url} has codes of checkpoint {theirs[:12]}, this one is {ours[:12]}: evaluate the "
            "checkpoint that it serves, or serve a collection of this one"
        )


def _search(url: str, path: Path, k: int) -> _Hits:
    """The answer of the service to one picture, sent byte for byte."""
    boundary = secrets.token_hex(16)
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="k"\r\n\r\n{k}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="query"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    body = head.encode() + read_bytes(path) + f"\r\n--{boundary}--\r\n".encode()
    kind = f"multipart/form-data; boundary={boundary}"
    return _ask(f"{url}/v1/search", _Hits, body=body, headers={"Content-Type": kind}, name=path.name)


def _ask(
    url: str, kind: type[_T], *, body: bytes | None = None, headers: dict[str, str] | None = None, name: str = ""
) -> _T:
    """What a service answers, as `kind`; a POST where there is a body."""
    if not url.startswith(("http://", "https://")):
        raise BadConfig(
            f"--url is the address of a service, such as http://127.0.0.1:8000, not {url.partition('/v1/')[0]}"
        )
    try:
        request = urllib.request.Request(url, data=body, headers=headers or {})
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            content = response.read()
    except urllib.error.HTTPError as error:
        detail = _detail(error.read()) or f"{error.code} {error.reason}"
        raise BadConfig(f"the service refused {f'the query {name}' if name else url}: {detail}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise BadConfig(f"no service answers at {url} ({reason}): start it with `hashseek serve`") from None
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError:
        raise BadConfig(f"what answers at {url} is no Hashseek service of this version: correct --url") from None


def _detail(content: bytes) -> str:
    """The sentence of a problem JSON, or nothing."""
    try:
        found = json.loads(content)
    except ValueError:
        return ""
    return str(found.get("detail", "")) if isinstance(found, dict) else ""


def _few(names: Sequence[str]) -> str:
    """How many, and the first of them."""
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{len(names)} images ({', '.join(names[:_SHOWN])}{more})"
