"""Collections of codes that no model made."""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hashseek.indexing.catalog import Catalog, NewImage, StoredImage, create_catalog
from hashseek.indexing.catalog.records import StoredCode
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.ingest.batch import IngestReport
from hashseek.indexing.maintenance.exchange import import_
from hashseek.retrieval.codes import Codes, pack

# Attributes of images for tests of filters: every JSON type, nested names, and strings that spell numbers.
ATTRIBUTES = [
    {"year": 2014, "camera": "X", "title": "abc"},
    {"year": 2015, "camera": {"model": "X"}, "title": "abd"},
    {"year": "2016", "camera.model": "X", "title": "Äbc"},
    {"year": 2015.5, "camera": {"model": "x"}, "title": ""},
    {"year": "unknown", "flag": True, "title": 5},
    {"year": None, "flag": False, "zip": "01234"},
    {"year": [2015], "flag": "true", "zip": 1234},
    {"year": True, "flag": 1, "date": "2015-06-01"},
    {"date": "2016", "zip": "1234"},
    {},
]


def random_codes(rng: np.random.Generator, n: int, n_bits: int, n_distinct: int | None = None) -> Codes:
    """Packed codes; with `n_distinct`, so few different ones that equal distances are the rule."""
    codes = pack(rng.standard_normal((n_distinct or n, n_bits)))
    return codes if n_distinct is None else codes[rng.integers(0, n_distinct, n)]


def new_images(codes: Codes, *, start: int = 0, labels: tuple[str, ...] = ()) -> list[NewImage]:
    """Records of images that exist in a catalog only, numbered from `start`."""
    return [
        NewImage(f"/nowhere/{i}.jpg", f"{i:064x}", 10, 20, 30, "image/jpeg", labels, code)
        for i, code in enumerate(codes, start=start)
    ]


def with_codes(
    catalog: Catalog, codes: Mapping[int, Sequence[int]], engine: str = ""
) -> list[tuple[StoredImage, StoredCode]]:
    """Stored images, by id, with new codes of them, for `CodeSpaces.add_codes`."""
    return [(catalog.one(i), StoredCode(np.array(code, np.uint8), engine, None)) for i, code in codes.items()]


def file_of(collection: Collection, image: StoredImage) -> Path:
    """Where the image's file is, or was when it was added."""
    return Path(collection.uri_of(image))


def code_collection(folder: Path, *, n_bits: int) -> Collection:
    """An empty collection without a checkpoint: enough for codes that no model made."""
    folder.mkdir(parents=True, exist_ok=True)
    create_catalog(folder / CATALOG, fingerprint="f" * 64, n_bits=n_bits)
    return Collection(folder)


def index_folder(folder: Path) -> Path:
    """The folder of the only index of a collection."""
    [found] = (folder / "index").iterdir()
    return found


def sql(path: Path, *statements: str) -> list[tuple[Any, ...]]:
    """Execute statements in the SQLite file `path`, as other programs could; returns the rows of the last one."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        return [db.execute(statement).fetchall() for statement in statements][-1]


def import_export(place: Path, folder: Path, *, checkpoint: Path | None) -> IngestReport:
    """Import an export to the end; returns the counts with all problems."""
    reports = list(import_(place, folder, checkpoint=checkpoint))
    return replace(reports[-1], problems=[problem for report in reports for problem in report.problems])


def outcome(report: IngestReport) -> tuple[int, int, int, int]:
    """(added, updated, known, skipped)."""
    return report.added, report.updated, report.known, report.skipped


def n_stored(folder: Path) -> int:
    """The number of images of a collection, of which all parts agree."""
    with closing(Collection(folder, read_only=True)) as opened:
        assert opened.verify() == []
        return len(opened)


def codes_by_path(collection: Collection) -> dict[str, bytes]:
    """The code of every image that has one."""
    images = collection.catalog.page(after=0, limit=10**6)
    codes = collection.catalog.spaces.codes_of([image.id for image in images])
    return {image.path: codes[image.id].code.tobytes() for image in images if image.id in codes}


def add_with_attributes(collection: Collection, each: Sequence[Any]) -> None:
    """Add an image for each object of attributes, with the keys key/0, key/1 and so on."""
    codes = random_codes(np.random.default_rng(0), len(each), collection.n_bits)
    images = zip(new_images(codes), each, strict=True)
    collection.add([replace(image, attributes=own, key=f"key/{i}") for i, (image, own) in enumerate(images)])
