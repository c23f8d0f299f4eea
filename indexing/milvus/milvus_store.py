"""A collection in a Milvus server. It answers like a collection in a folder, including ties by id."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from hashseek.indexing.catalog import Change, NewImage, StoredImage
from hashseek.indexing.catalog.attributes import Ids
from hashseek.indexing.catalog.database import now
from hashseek.indexing.catalog.filters import Filter
from hashseek.indexing.catalog.records import (
    FileRecord,
    Page,
    StoredCode,
    check_attributes,
    check_described,
    check_labels,
    page_of,
    same_attributes,
)
from hashseek.indexing.collection import Limits, check_checkpoint
from hashseek.indexing.index.exact_scan import Distances
from hashseek.indexing.milvus import rows as of_rows
from hashseek.indexing.milvus.connection import Connection, StoreUnavailable
from hashseek.indexing.milvus.expressions import both, expression, literal
from hashseek.indexing.milvus.nearest import MOST, Nearest, Neighbour
from hashseek.indexing.milvus.rows import CODE, N_LISTS, RECORD, Row
from hashseek.indexing.milvus_uri import MilvusUri
from hashseek.indexing.uris import is_moved
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.codes import Codes, code_size
from hashseek.retrieval.errors import BadCollection, BadConfig, UnknownImage

FORMAT = 1
BATCH = 1000  # rows that are written together
EFFORT = 32  # lists of BIN_IVF_FLAT that a search reads by default
_COUNT_SECONDS = 60.0  # for which counts of labels and engines are cached: counting reads every row


class MilvusStore:
    """An open collection in Milvus, used like `Collection`. Safe to use from several threads.

    Several processes may add at the same time, see `hashseek.indexing.milvus.rows.ids_of`. Two that change the same
    image at the same time overwrite each other: the last one wins.
    """

    keeps_features = False
    in_folder = False  # `records_by_path` reads every row, and ids are hashes

    def __init__(
        self, uri: MilvusUri, *, checkpoint: Path | None = None, create: bool = False, read_only: bool = False
    ) -> None:
        """Connect and open; with `create`, create the collection for `checkpoint` if it does not exist.

        Raises:
            StoreUnavailable: the server does not answer.
            BadCollection: there is no such collection, or it is not a Hashseek collection.
            ForeignCodes: the collection was made with another checkpoint.
            BadConfig: its index is not the one that the URI names.
        """
        self.uri = uri
        self._checkpoint = checkpoint
        self._read_only = read_only
        self._writes = create
        self._counted = 0.0
        self._counts: tuple[dict[str, int], dict[str, int]] = {}, {}
        self._lock = threading.Lock()
        header = None if checkpoint is None else load_header(checkpoint)  # refused before anything is created
        self._connection = Connection(uri, is_patient=create)  # if images are added, lookups wait as long as writes
        try:
            if create and header is not None and not self._connection.read("has_collection"):
                self._create(header.fingerprint, header.n_bits)
            self._description = self._connection.read("describe_collection")
            self.fingerprint, self.n_bits = self._read_description()
            if checkpoint is not None:
                check_checkpoint(self, checkpoint)
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _create(self, fingerprint: str, n_bits: int) -> None:
        # Several processes may create it at once: Milvus accepts that if they all pass the same.
        about = json.dumps({"hashseek": FORMAT, "fingerprint": fingerprint, "n_bits": n_bits})
        schema = of_rows.make_schema(about, n_bytes=code_size(n_bits))
        self._connection.write("create_collection", schema=schema, consistency_level="Strong")

    def _read_description(self) -> tuple[str, int]:
        """(fingerprint, n_bits) from the collection's description."""
        try:
            about = json.loads(self._description["description"])
            fingerprint, n_bits = str(about["fingerprint"]), int(about["n_bits"])
            [dimension] = [field["params"]["dim"] for field in self._description["fields"] if field["name"] == CODE]
            if (about["hashseek"], dimension) != (FORMAT, 8 * code_size(n_bits)):
                raise ValueError(f"format {about['hashseek']}, vectors of {dimension} bits for codes of {n_bits}")
        except (ValueError, KeyError, TypeError) as error:
            raise BadCollection(
                f"{self.uri} is not a collection of this version of Hashseek ({error!r}): choose another one"
            ) from None
        return fingerprint, n_bits

    def _prepare(self) -> None:
        """Build the indexes and load the collection, unless that is done."""
        if not {*of_rows.INDEXED} <= {*self._connection.read("list_indexes")}:  # another process may be creating them
            self._connection.write("create_index", index_params=of_rows.make_indexes(self.uri.index or "flat"))
        self.kind = str(self._connection.read("describe_index", index_name=CODE)["index_type"])
        wanted = self.uri.index
        if wanted is not None and (wanted == "ivf") == self.finds_all:
            raise BadConfig(
                f"{self.uri} has an index {self.kind}, not {wanted}: leave out index={wanted}, or create another "
                "collection with it"
            )
        if self._connection.read("get_load_state")["state"].name != "Loaded":
            self._connection.write("load_collection")

    @property
    def place(self) -> str:
        """The URI."""
        return str(self.uri)

    @property
    def checkpoint(self) -> Path:
        """The file that was given when the collection was opened."""
        if self._checkpoint is None:
            raise BadConfig(f"{self.uri} stores no checkpoint: pass the file it was created with (--checkpoint)")
        return self._checkpoint

    @property
    def finds_all(self) -> bool:
        """Whether searches are exact even without a filter or a largest distance."""
        return "IVF" not in self.kind

    def __len__(self) -> int:
        return self._count("", "Strong" if self._writes else None)  # it counts what was just added or removed

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    # ------------------------------------------------------------ images

    def add(self, images: list[NewImage]) -> list[tuple[int, Change]]:
        """Store images, see `Catalog.add`; `BATCH` of them are written together."""
        for image in images:
            check_described(image.labels, image.key, image.attributes)
        return [outcome for at in range(0, len(images), BATCH) for outcome in self._add(images[at : at + BATCH])]

    def _add(self, images: list[NewImage]) -> list[tuple[int, Change]]:
        ids = sorted({i for image in images for i in of_rows.ids_of(image)})
        hashes = sorted({image.sha256 for image in images if image.key is None})
        among = f"id in {literal(ids)} or sha256 in {literal(hashes)}"
        pages = self._pages(among, ["*"], MOST, consistency="Strong")
        known: dict[int, Row] = {row["id"]: row for page in pages for row in page}
        time, outcome, changed = now(), list[tuple[int, Change]](), dict[int, Row]()
        for image in images:
            row = of_rows.find_row(image, known)
            new, change = self._stored(image, row, known, time)
            known[new["id"]] = new
            if new != row:
                changed[new["id"]] = new
            outcome.append((new["id"], change))
        self._upsert(list(changed.values()))
        return outcome

    def _stored(self, image: NewImage, row: Row | None, known: Mapping[int, Row], time: str) -> tuple[Row, Change]:
        """The row of an image after it was stored, and what changed; `row` is the one it had before."""
        if row is None:
            free = next((i for i in of_rows.ids_of(image) if i not in known), None)
            if free is None:
                raise BadCollection(
                    f"both ids of {image.key or image.path} are taken by other images: give it another key"
                )
            new = {"id": free, "key": image.key or "", "added_at": time, "changed_at": time}
            return new | of_rows.content_of(image) | of_rows.described(image.labels, image.attributes), "added"
        if row["sha256"] == image.sha256:
            file = of_rows.file_record(row)
            moves = image.key is not None or is_moved(
                row["path"], image.path, sha256=image.sha256, stamp=(file.bytes, file.mtime_ns)
            )
            new = row | ({"path": image.path} if moves else {})
            if new["path"] == image.path and image.mtime_ns is not None:
                new |= {"mtime_ns": image.mtime_ns}
            differs = new["path"] != row["path"]
        else:
            new, differs = row | of_rows.content_of(image), True
        is_described = False
        if image.key is not None:
            new, is_described = _redescribed(new, image.new_labels, image.new_attributes)
        if not (differs or is_described):
            return new, "known"
        return new | {"changed_at": time}, "updated"

    def add_with_file(self, *_: object, **__: object) -> tuple[int, Change]:
        """Refuse to store a file: Milvus stores no files.

        Raises:
            BadConfig: always.
        """
        raise BadConfig(
            f"the collection {self.uri.name} is in Milvus, which stores no image files: put the file where the service "
            "can read it, and add it with `hashseek index add`"
        )

    def update(
        self, image_id: int, *, labels: Sequence[str] | None = None, attributes: Mapping[str, Any] | None = None
    ) -> StoredImage:
        """Replace the labels or the attributes of an image, see `Catalog.update`."""
        check_labels(labels or ())
        if attributes is not None:
            check_attributes(attributes)
        new, differs = _redescribed(self._row(image_id, ["*"], "Strong"), labels, attributes)
        if differs:
            new |= {"changed_at": now()}
            self._upsert([new])
        return of_rows.stored_image(new)

    def remove(self, ids: list[int], *, missing_ok: bool = False) -> None:
        """Remove images, see `Catalog.remove`."""
        self._check_writable()
        if not missing_ok:
            stored = {row["id"] for row in self._rows("id", ids, ["id"], "Strong")}
            if missing := [image_id for image_id in ids if image_id not in stored]:
                raise UnknownImage(f"there is no image {missing[0]} in the collection")
        for at in range(0, len(ids), MOST):
            self._connection.write("delete", ids=[int(i) for i in ids[at : at + MOST]])
        self._writes = True

    def _upsert(self, rows: list[Row]) -> None:
        self._check_writable()
        if rows:
            self._connection.write("upsert", data=rows)
            self._writes = True

    def _check_writable(self) -> None:
        if self._read_only:
            raise BadCollection(f"{self.uri} was opened read-only: it cannot be changed")

    # ------------------------------------------------------------ reading

    def _query(self, among: str, fields: list[str], limit: int, consistency: str | None) -> list[Row]:
        # Only changes ask for "Strong" regardless of the URI; they wait as long as their writes.
        call = self._connection.write if consistency == "Strong" else self._connection.read
        found = call(
            "query",
            filter=among,
            output_fields=fields,
            consistency_level=consistency or self._consistency,
            **({} if fields == ["count(*)"] else {"limit": limit}),
        )
        return [{**row, CODE: of_rows.code_bytes(row)} if CODE in row else dict(row) for row in found]

    @property
    def _consistency(self) -> str:
        return self.uri.consistency.capitalize()

    def _rows(self, field: str, values: Sequence[Any], fields: list[str], consistency: str | None = None) -> list[Row]:
        """The rows that have one of the values in a field, by ascending id; several rows may have the same value."""
        if field == "id":
            values = [int(value) for value in values if 0 <= value < 2**63]
        rows: dict[int, Row] = {}
        for at in range(0, len(values), BATCH):
            among = f"{field} in {literal(values[at : at + BATCH])}"
            for page in self._pages(among, fields, MOST, consistency=consistency):
                rows |= {row["id"]: row for row in page}
        return [rows[i] for i in sorted(rows)]

    def _pages(
        self, among: str, fields: list[str], size: int, *, after: int = 0, consistency: str | None = None
    ) -> Iterator[list[Row]]:
        """Rows that match an expression, by ascending id, at most `MOST` at a time; the first page has `size`."""
        size = min(size, MOST)
        while True:
            page = self._query(both(among, f"id > {after}"), fields, size, consistency)
            yield sorted(page, key=lambda row: int(row["id"]))
            if len(page) < size:
                return
            after, size = max(row["id"] for row in page), MOST

    def _ids(self, among: str, size: int = MOST, *, after: int = 0) -> Iterator[int]:
        return (row["id"] for page in self._pages(among, ["id"], size, after=after) for row in page)

    def _count(self, among: str, consistency: str | None = None) -> int:
        return int(self._query(among, ["count(*)"], 1, consistency)[0]["count(*)"])

    def _row(self, image_id: int, fields: list[str], consistency: str | None = None) -> Row:
        if not (found := self._rows("id", [image_id], fields, consistency)):
            raise UnknownImage(f"there is no image {image_id} in the collection")
        return found[0]

    def get(self, ids: Sequence[int]) -> list[StoredImage | None]:
        """Records by id, in that order; None for an id that is not stored."""
        found = {row["id"]: of_rows.stored_image(row) for row in self._rows("id", ids, RECORD)}
        return [found.get(int(i)) for i in ids]

    def one(self, image_id: int) -> StoredImage:
        """The record of one image, see `Catalog.one`."""
        return of_rows.stored_image(self._row(image_id, RECORD))

    def by_key(self, key: str) -> StoredImage:
        """The record of the image with this key, see `Catalog.by_key`."""
        if not (known := self.ids_by_key([key])):
            raise UnknownImage(f"there is no image with the key {key[:80]!r} in the collection")
        return self.one(known[key])

    def ids_by_key(self, keys: Sequence[str]) -> dict[str, int]:
        """The ids of these keys; keys that are not stored are left out."""
        wanted = {key for key in keys if key and key == key.encode(errors="replace").decode()}
        rows = self._rows("id", [i for key in wanted for i in of_rows.ids_of_key(key)], ["id", "key"])
        return {row["key"]: row["id"] for row in rows if row["key"] in wanted}

    def by_content(self, sha256: str) -> tuple[StoredImage, StoredCode] | None:
        """Record and code of an image with this content, see `Catalog.by_content`.

        Content stored in the last second may be missed; it is then encoded again, and `add` finds it.
        """
        rows = self._query(f"sha256 == {literal(sha256)}", [*RECORD, CODE], 1, "Eventually")
        return (of_rows.stored_image(rows[0]), of_rows.stored_code(rows[0])) if rows else None

    def records_by_path(self, paths: Sequence[str]) -> dict[str, FileRecord]:
        """The record of each of these paths that has one; if there are several, the last."""
        fields = ["id", "key", "path", "bytes", "mtime_ns"]
        return {row["path"]: of_rows.file_record(row) for row in self._rows("path", list(dict.fromkeys(paths)), fields)}

    def ids_where(self, among: Filter) -> Ids:
        """Ids (ascending) of the images that pass a filter."""
        return np.fromiter(self._ids(expression(among)), np.int64)

    def browse(self, among: Filter | None, *, after: int = 0, offset: int = 0, limit: int) -> Page:
        """At most `limit` records with ids above `after`, without the first `offset`."""
        chosen, n = expression(among), offset + limit + 1
        ids = list(islice(self._ids(chosen, n, after=after), offset, n))
        return page_of(ids, self.get(ids), limit=limit, total=self._count(chosen))

    def code_of(self, image_id: int) -> StoredCode:
        """The code of one image, see `Catalog.code_of`."""
        return of_rows.stored_code(self._row(image_id, [CODE, "engine"]))

    def features_of(self, ids: Sequence[int]) -> tuple[Ids, NDArray[np.float16]]:  # noqa: ARG002
        """Nothing: features are not stored."""
        return np.zeros(0, np.int64), np.zeros((0, 0), np.float16)

    def uri_of(self, image: StoredImage) -> str:
        """Where the image is."""
        return image.path

    # ------------------------------------------------------------ searching

    def search(self, query_codes: Codes, *, k: int, **limits: Unpack[Limits]) -> list[tuple[Distances, Ids]]:
        """The k nearest of each query, see `Collection.search`; `effort` is the number of lists that IVF reads."""
        found = [self._nearest(code, k, limits) for code in query_codes]
        return [_arrays(hits, query_codes.shape[1])[:2] for hits in found]

    def candidates(self, query_code: Codes, *, n: int, **limits: Unpack[Limits]) -> tuple[Distances, Ids, Codes]:
        """The `n` nearest images and all others at the distance of the last, see `Collection.candidates`."""
        return _arrays(self._nearest(query_code[0], n, limits, ties=True), query_code.shape[1])

    def _nearest(self, code: NDArray[np.uint8], k: int, limits: Limits, *, ties: bool = False) -> list[Neighbour]:
        max_distance, among, effort = limits.get("max_distance"), limits.get("among"), limits.get("effort")
        if effort is not None and self.finds_all:
            raise BadConfig(f"effort is only for approximate indexes, not for kind {self.kind}: leave it out")
        if effort is not None and effort < 1:
            raise BadConfig(f"effort is the number of lists and must be at least 1, got {effort}")
        is_free = max_distance is None and among is None  # otherwise all lists are read, which is exact
        n_lists = min(effort or EFFORT, N_LISTS) if is_free else N_LISTS
        params = {} if self.finds_all else {"nprobe": n_lists}
        nearest = Nearest(self._connection, code.tobytes(), expression(among), self._consistency, params)
        radius = self.n_bits if max_distance is None else min(max_distance, self.n_bits)
        return nearest.search(k, radius=radius, ties=ties)

    def histogram(self, query_code: Codes, *, among: Filter | None = None) -> NDArray[np.int64] | None:  # noqa: ARG002
        """None: Milvus cannot count distances."""
        return None

    # ------------------------------------------------------------ state

    def label_counts(self) -> dict[str, int]:
        """Number of images per label, by name; up to a minute old."""
        return self._counted_fields()[0]

    def engines(self) -> dict[str, int]:
        """Number of codes per engine that computed them; up to a minute old."""
        return self._counted_fields()[1]

    def _counted_fields(self) -> tuple[dict[str, int], dict[str, int]]:
        with self._lock:
            if not self._counted or time.monotonic() - self._counted > _COUNT_SECONDS:
                labels, engines = Counter[str](), Counter[str]()
                for page in self._pages("", ["id", "labels", "engine"], MOST):
                    for row in page:
                        labels.update(row["labels"])
                        engines[row["engine"]] += 1
                self._counts = dict(sorted(labels.items())), dict(sorted(engines.items()))
                self._counted = time.monotonic()
            return self._counts

    def calibration(self) -> Any | None:
        """None: calibrations are not stored."""
        return None

    def describe_index(self) -> dict[str, Any]:
        """Kind and consistency; clients of a service need not know the server."""
        return {"kind": self.kind, "consistency": self.uri.consistency}

    def check_readable(self) -> object:
        """Raise `BadCollection` if records cannot be read now."""
        return self._connection.probe(
            "query", filter="id == 0", output_fields=["id"], consistency_level="Eventually", limit=1
        )

    def is_current(self) -> bool:
        """Whether the collection is still the one that was opened; True if the server does not answer.

        If it is not, nothing more is read from it: a new one may have codes of another checkpoint.
        """
        if self._connection.is_stale:
            return False
        try:
            if self._connection.read("describe_collection")["collection_id"] == self._description["collection_id"]:
                return True
        except StoreUnavailable:
            return True
        except BadCollection:
            pass  # it was dropped
        self._connection.is_stale = True
        return False

    def merge_segments(self) -> None:
        """Milvus does this itself."""

    def save_index(self) -> None:
        """Milvus does this itself."""


def _redescribed(row: Row, labels: Sequence[str] | None, attributes: Mapping[str, Any] | None) -> tuple[Row, bool]:
    """A row with the given labels and attributes, and whether any of them differs."""
    same = (labels is None or set(labels) == set(row["labels"])) and (
        attributes is None or same_attributes(attributes, row["attributes"])
    )
    if same:
        return row, False
    new = of_rows.described(
        row["labels"] if labels is None else labels, row["attributes"] if attributes is None else attributes
    )
    return row | new, True


def _arrays(found: list[Neighbour], n_bytes: int) -> tuple[Distances, Ids, Codes]:
    return (
        np.array([one.distance for one in found], np.int32),
        np.array([one.id for one in found], np.int64),
        np.frombuffer(b"".join(one.code for one in found), np.uint8).reshape(len(found), n_bytes),
    )
