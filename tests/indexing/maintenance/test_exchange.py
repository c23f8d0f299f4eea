"""An export holds every record and code; imported, it is the same collection, and nothing was encoded."""

import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hashseek.indexing.collection import Collection
from hashseek.indexing.ingest.batch import IngestReport
from hashseek.indexing.maintenance import exchange
from hashseek.indexing.maintenance.exchange import export
from hashseek.retrieval.errors import BadConfig, BadDataset, ForeignCodes
from support.collections import code_collection, import_export, new_images, random_codes, sql
from support.faults import fill


@pytest.fixture
def exported(own_collection, tmp_path, monkeypatch):
    """A collection with a real checkpoint, keys, attributes and kept files, and its export."""
    monkeypatch.chdir(own_collection.parent)
    with closing(Collection(Path(own_collection.name))) as collection:
        fill(collection, 8, start=30, keep=lambda number: True)
        collection.remove([3])
        export(collection, tmp_path / "e.parquet")
    return own_collection, tmp_path / "e.parquet"


def records(folder):
    """What an export contains of each image, without ids and times; those without a key first, as they are imported."""
    with closing(Collection(folder, read_only=True)) as collection:
        images = sorted(collection.catalog.page(after=0, limit=10**6), key=lambda image: image.key is not None)
        codes = collection.catalog.spaces.codes_of([image.id for image in images])
        return [
            (
                image.key,
                collection.uri_of(image),
                image.sha256,
                (image.width, image.height, image.bytes, image.media_type),
                image.labels,
                image.attributes,
                codes[image.id].code.tobytes(),
                codes[image.id].engine,
            )
            for image in images
        ]


def test_a_round_trip_gives_an_equal_collection_without_encoding(exported, checkpoint, hashseek, tmp_path):
    folder, file = exported
    never = (
        "import hashseek.indexing.cli.collection\n"
        "from hashseek.retrieval.encoder import Encoder\n"
        "Encoder.features_and_outputs = None"
    )
    command = ("index", "import", file, tmp_path / "new")
    code, out, err = hashseek(*command, "--checkpoint", checkpoint, before=never)
    assert (code, err) == (0, "")
    assert out == f"added 19, updated 0, already stored 0; from {file} into {tmp_path}/new\n"
    assert records(tmp_path / "new") == records(folder)
    assert hashseek("index", "verify", tmp_path / "new")[:2] == (0, "19 images, 0 problems\n")
    code, out, _ = hashseek(*command)
    assert (code, out.split(";")[0]) == (0, "added 0, updated 0, already stored 19")


def test_an_import_that_is_killed_is_completed_by_repeating_it(exported, checkpoint, start, hashseek, tmp_path):
    folder, file = exported
    after_group_2 = (
        "import os, signal\n"
        "import hashseek.indexing.maintenance.exchange as exchange\n"
        "exchange.GROUP, calls, original = 5, [], exchange.Writer.add\n"
        "def add(self, images):\n"
        "    report = original(self, images)\n"
        "    calls.append(1)\n"
        "    return report if len(calls) < 2 else os.kill(os.getpid(), signal.SIGKILL)\n"
        "exchange.Writer.add = add\n"
    )
    command = ("index", "import", file, tmp_path / "new", "--checkpoint", checkpoint)
    assert start(*command, before=after_group_2).wait() == -signal.SIGKILL
    with closing(Collection(tmp_path / "new", read_only=True)) as collection:
        assert len(collection) == 10
    code, out, _ = hashseek(*command)
    assert (code, out.split(";")[0]) == (0, "added 9, updated 0, already stored 10")
    assert records(tmp_path / "new") == records(folder)


def test_two_records_of_one_content_are_two_after_an_import_and_one_after_a_shard(tmp_path):
    first, second = new_images(random_codes(np.random.default_rng(0), 2, 12))
    second = replace(second, path="https://example.org/2.jpg")
    keyed, keyless = replace(first, key="k", labels=("a",)), replace(second, labels=("b",))
    with closing(code_collection(tmp_path / "a", n_bits=12)) as collection:
        collection.add([keyed, keyless, replace(second, key="k")])  # the key gets the content of the other
        before = records(tmp_path / "a")
        assert [(key, labels) for key, *_, labels, _, _, _ in before] == [(None, ("b",)), ("k", ("a",))]
        export(collection, tmp_path / "e.parquet")
    code_collection(tmp_path / "b", n_bits=12).close()
    assert import_export(tmp_path / "e.parquet", tmp_path / "b", checkpoint=None) == IngestReport(added=2)
    assert records(tmp_path / "b") == before
    assert import_export(tmp_path / "e.parquet", tmp_path / "b", checkpoint=None) == IngestReport(known=2)
    # A shard is part of `index add`: its new key is for the image of the same file that has none.
    shard = exchange.shard([replace(second, key="new")], [], fingerprint="f" * 64, n_bits=12)
    (tmp_path / "shard.parquet").write_bytes(shard)
    assert import_export(tmp_path / "shard.parquet", tmp_path / "b", checkpoint=None) == IngestReport(updated=1)
    assert [(key, labels) for key, *_, labels, _, _, _ in records(tmp_path / "b")] == [("new", ("b",)), ("k", ("a",))]


def test_the_columns_of_an_export(exported):
    folder, file = exported
    table = pq.read_table(file)
    assert table.schema.field("labels").type == pa.list_(pa.string())
    assert table.schema.field("code").type == pa.binary(6)
    row = next(row for row in table.to_pylist() if row["key"] == "key/30")
    assert (row["uri"].startswith(str(folder)), row["labels"], row["attributes"]) == (True, ["cat"], '{"number": 30}')
    assert row["added_at"].tzinfo is not None
    about = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert (about["hashseek.n_bits"], about["hashseek.n_images"]) == ("48", "19")


@pytest.mark.parametrize("n", [0, 1, 5])
def test_row_groups_of_any_number_of_images(n, tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "GROUP", 2)
    with closing(code_collection(tmp_path / "a", n_bits=12)) as collection:
        collection.add(new_images(random_codes(np.random.default_rng(0), n, 12)))
        assert export(collection, tmp_path / "e.parquet") == (n, 0)
    assert pq.ParquetFile(tmp_path / "e.parquet").num_row_groups == (n + 1) // 2
    code_collection(tmp_path / "b", n_bits=12).close()
    assert import_export(tmp_path / "e.parquet", tmp_path / "b", checkpoint=None).added == n
    assert records(tmp_path / "b") == records(tmp_path / "a")


def test_an_export_for_another_checkpoint_creates_and_changes_nothing(exported, other_checkpoint, checkpoint, tmp_path):
    _, file = exported
    with pytest.raises(ForeignCodes):
        import_export(file, tmp_path / "new", checkpoint=other_checkpoint)
    assert not (tmp_path / "new").exists()
    with closing(code_collection(tmp_path / "other", n_bits=36)), pytest.raises(ForeignCodes):
        import_export(file, tmp_path / "other", checkpoint=None)


def column(name, values):
    def change(table):
        place = table.schema.get_field_index(name)
        field = pa.field(name, values.type)
        return table.set_column(place, field, values).replace_schema_metadata(table.schema.metadata)

    return change


BAD = {
    "no sha256": lambda table: table.drop_columns(["sha256"]),
    "codes of 5 bytes": column("code", pa.array([b"\1" * 5] * 19, pa.binary(5))),
    "no code": column("code", pa.array([None] * 19, pa.binary(6))),
    "no metadata": lambda table: table.replace_schema_metadata({}),
    "format 2": lambda t: t.replace_schema_metadata({**t.schema.metadata, b"hashseek.format": b"2"}),
    "another hash": column("sha256", pa.array(["a" * 64] * 2 + ["x"] * 17)),
    "a longer hash": column("sha256", pa.array(["a" * 65] * 19)),
    "attributes": column("attributes", pa.array(["[1]"] * 19)),
    "deep attributes": column("attributes", pa.array(["[" * 100_000] * 19)),
    "a relative uri": column("uri", pa.array(["/a", "files/../../victim", *["/b"] * 17])),
    "size": column("size", pa.array([0] * 19)),
    "width": column("width", pa.array([0] * 19, pa.int32())),
    "media_type": column("media_type", pa.array(["text/html\r\nX: 1"] * 19)),
    "a label": column("labels", pa.array([["a", None]] * 19)),
    "a key": column("key", pa.array(["a", "b" * 513, *["c"] * 17])),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_file_that_is_not_a_valid_export_is_refused_and_nothing_is_added(exported, checkpoint, tmp_path, fault):
    _, file = exported
    pq.write_table(BAD[fault](pq.read_table(file)), file)
    with pytest.raises((BadDataset, BadConfig)):
        import_export(file, tmp_path / "new", checkpoint=checkpoint)
    assert not (tmp_path / "new").exists()


def test_missing_rows_are_reported(exported, checkpoint, tmp_path):
    _, file = exported
    pq.write_table(pq.read_table(file).slice(0, 5), file)
    with pytest.raises(BadDataset):
        import_export(file, tmp_path / "new", checkpoint=checkpoint)


def test_every_cut_and_flipped_bit_is_refused_or_harmless(exported, checkpoint, tmp_path):
    folder, file = exported
    whole, rng, expected = file.read_bytes(), np.random.default_rng(0), records(folder)
    damages = [whole[:length] for length in (0, 3, 100, *rng.integers(len(whole), size=5))]
    for _ in range(40):
        damages.append(bytearray(whole))
        damages[-1][rng.integers(len(whole))] ^= 1 << rng.integers(8)
    for number, damaged in enumerate(damages):
        file.write_bytes(damaged)
        try:
            import_export(file, tmp_path / str(number), checkpoint=checkpoint)
        except (BadDataset, ForeignCodes):
            continue
        assert len(damaged) == len(whole)
        assert records(tmp_path / str(number)) == expected


def test_existing_and_missing_files_and_a_missing_pyarrow_are_refused(exported, hashseek, tmp_path):
    folder, file = exported
    before = file.read_bytes()
    with closing(Collection(folder)) as collection:
        for place in (file, tmp_path / "no" / "e.parquet"):
            with pytest.raises(BadConfig):
                export(collection, place)
    assert file.read_bytes() == before
    with pytest.raises(BadDataset):
        import_export(tmp_path / "none", folder, checkpoint=None)
    code, _, err = hashseek("index", "import", file, folder, before="import sys; sys.modules['pyarrow'] = None")
    assert (code, "hashseek[parquet]" in err) == (2, True)


def test_an_export_counts_images_without_a_code(exported, hashseek, tmp_path):
    folder, _ = exported
    sql(folder / "catalog.sqlite", "DELETE FROM codes WHERE image_id IN (4, 5)")
    code, out, err = hashseek("index", "export", folder, tmp_path / "holes.parquet")
    assert (code, out) == (0, f"{tmp_path}/holes.parquet: 19 images\n")
    assert err.startswith("2 ")


def test_an_export_is_not_written_under_the_name_of_another_format(exported, hashseek, tmp_path):
    folder, _ = exported
    assert hashseek("index", "export", folder, tmp_path / "all.csv")[0] == 2
    assert not list(tmp_path.glob("all*"))


@pytest.mark.parametrize("has_content", [True, False])
def test_labels_that_an_import_does_not_store_and_a_path_that_it_adds_again_are_noted(tmp_path, has_content):
    first, second = new_images(random_codes(np.random.default_rng(0), 2, 12))
    exported = replace(first, labels=("new",)) if has_content else replace(second, path=first.path)
    for name, image in (("a", exported), ("b", first)):
        with closing(code_collection(tmp_path / name, n_bits=12)) as collection:
            collection.add([image])
            if name == "a":
                export(collection, tmp_path / "e.parquet")
    report = import_export(tmp_path / "e.parquet", tmp_path / "b", checkpoint=None)
    assert (report.known, report.added) == (has_content, not has_content)
    assert [note.uri for note in report.problems] == [first.path]


def test_a_later_export_replaces_labels_and_attributes_also_by_none(tmp_path):
    keyed, keyless = new_images(random_codes(np.random.default_rng(0), 2, 12), labels=("old",))
    keyed = replace(keyed, key="k", attributes={"year": 2020})
    code_collection(tmp_path / "b", n_bits=12).close()
    with closing(code_collection(tmp_path / "a", n_bits=12)) as collection:
        ids = [image_id for image_id, _ in collection.add([keyed, keyless])]
        export(collection, tmp_path / "1.parquet")
        for image_id in ids:
            collection.catalog.update(image_id, labels=(), attributes={})
        export(collection, tmp_path / "2.parquet")
    import_export(tmp_path / "1.parquet", tmp_path / "b", checkpoint=None)
    report = import_export(tmp_path / "2.parquet", tmp_path / "b", checkpoint=None)
    assert (report.updated, report.known, [note.uri for note in report.problems]) == (1, 1, [keyless.path])
    with closing(Collection(tmp_path / "b")) as collection:
        replica = collection.by_key("k")
    assert (replica.labels, replica.attributes) == ((), {})
