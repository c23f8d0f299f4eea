"""Tar shards: images are read from inside the tar; damage, missing labels and changes are named."""

import gzip
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.errors import BadDataset, BadImage
from hashseek.retrieval.images import read_bytes
from hashseek.retrieval.tar_members import find_member, stored_in
from hashseek.training.data.datasets import build_splits
from support.dataset_files import sizes, write_tar
from support.pictures import draw, encoded

LONG = "a-folder-with-a-long-name/" * 8  # more than the 100 characters of a classic header


def jpeg(seed: int) -> bytes:
    return encoded(draw(seed, (40, 30)), "JPEG")


def labels_of(number: int) -> list[str]:
    return ["even" if number % 2 == 0 else "odd", *(["three"] if number % 3 == 0 else [])]


def as_json(number: int) -> tuple[str, bytes]:
    return ".json", json.dumps({"labels": labels_of(number), "caption": "what it shows"}).encode()


def write_shard(file: Path, numbers, *, label=as_json, layout=tarfile.GNU_FORMAT, prefix="", more=()) -> Path:
    members = {}
    for number in numbers:
        suffix, text = label(number)
        members[f"{prefix}{number:04}.jpg"] = jpeg(number)
        members[f"{prefix}{number:04}{suffix}"] = text
    return write_tar(file, members | dict(more), layout)


@pytest.fixture
def root(tmp_path) -> Path:
    folder = tmp_path / "shards"
    write_shard(folder / "train-000.tar", range(4))
    write_shard(folder / "train-001.tar", range(4, 7))
    write_shard(folder / "query-000.tar", range(10, 12))
    write_shard(folder / "database-000.tar", range(20, 25))
    return folder


def globs(folder: Path) -> dict[str, str]:
    return {split: f"{folder}/{split}-*.tar" for split in ("train", "query", "database")}


def test_images_are_read_byte_for_byte_from_the_tar(root):
    splits = build_splits("shards", **globs(root))
    assert sizes(splits) == (2, 7, 5)
    assert splits.label_names == ("even", "odd", "three")
    for number, path in enumerate(splits.train.paths):
        assert path.name == f"{number:04}.jpg"
        assert read_bytes(path) == jpeg(number)
        assert stored_in(path).name == f"train-00{number // 4}.tar"
        found = {name for name, there in zip(splits.label_names, splits.train.labels[number], strict=True) if there}
        assert found == set(labels_of(number))
    assert len(list(root.iterdir())) == 4, "nothing is unpacked"


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "./", "Höhle, 2 °C/", LONG])
def test_every_kind_of_tar_and_name(root, layout, prefix):
    if prefix == LONG and layout == tarfile.USTAR_FORMAT:
        prefix = LONG[:120]  # all that this kind can name
    write_shard(root / "train-001.tar", range(4, 7), layout=layout, prefix=prefix)
    splits = build_splits("shards", **globs(root))
    assert [read_bytes(path) for path in splits.train.paths] == [jpeg(number) for number in range(7)]


def numbers(number: int) -> tuple[str, bytes]:
    return ".cls", " ".join(str(("even", "odd", "three").index(label)) for label in labels_of(number)).encode()


def test_labels_may_be_json_text_or_numbers(root):
    first = build_splits("shards", **globs(root))
    for label in (
        lambda number: (".json", json.dumps(labels_of(number)).encode()),
        lambda number: (".txt", " ; ".join(labels_of(number)).encode()),
        lambda number: (".txt", "\r\n".join(labels_of(number)).encode()),
    ):
        write_shard(root / "train-001.tar", range(4, 7), label=label)
        again = build_splits("shards", **globs(root))
        assert again.fingerprint == first.fingerprint
        np.testing.assert_array_equal(again.train.labels, first.train.labels)
    write_shard(root / "train-001.tar", range(4, 7), label=numbers)
    mixed = build_splits("shards", label_names=["even", "odd", "three"], **globs(root))
    assert mixed.fingerprint == first.fingerprint
    with pytest.raises(BadDataset, match="'2'|'three'"):
        build_splits("shards", label_names=["even", "odd"], **globs(root))


def test_numbers_without_names_are_sorted_as_numbers(tmp_path):
    for split, start in (("train", 0), ("query", 20), ("database", 40)):
        write_shard(
            tmp_path / f"{split}-0.tar", range(start, start + 12), label=lambda n: (".cls", str(n % 12).encode())
        )
    assert build_splits("shards", **globs(tmp_path)).label_names == tuple(str(n) for n in range(12))


def test_a_caption_beside_other_labels_is_no_label(root):
    write_shard(
        root / "train-001.tar",
        range(4, 7),
        label=lambda number: (".txt", b"a caption; of the picture"),
        more=[(f"{number:04}.json", json.dumps({"labels": labels_of(number)}).encode()) for number in range(4, 7)],
    )
    assert build_splits("shards", **globs(root)).label_names == ("even", "odd", "three")


def test_a_shard_is_indexed_once_and_again_when_it_changes(root, monkeypatch):
    first = build_splits("shards", **globs(root))
    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "open", lambda *args, **kwargs: pytest.fail("a shard was indexed again"))
        assert build_splits("shards", **globs(root)).fingerprint == first.fingerprint
        monkeypatch.chdir(root)
        relative = build_splits("shards", **globs(Path()))
        assert relative.fingerprint == first.fingerprint
        assert read_bytes(relative.train.paths[0]) == jpeg(0)
    write_shard(root / "train-001.tar", range(4, 9))
    assert sizes(build_splits("shards", **globs(root))) == (2, 9, 5)


def test_a_shard_that_changed_after_it_was_indexed_is_named(root):
    splits = build_splits("shards", **globs(root))
    last = splits.train.paths[-1]
    member = find_member(last)
    os.truncate(member.shard, member.offset + member.size - 1)
    with pytest.raises(BadImage, match=r"0006.jpg .*train-001.tar"):
        read_bytes(last)
    member.shard.unlink()
    with pytest.raises(BadImage, match=r"0006.jpg"):
        read_bytes(last)


@pytest.mark.parametrize(
    ("bad", "more", "named"),
    [
        ((".json", b'{"labels": ["even"'), (), "0005.jpg"),
        ((".json", b'{"labels": "even"}'), (), "0005.jpg"),
        ((".cls", b"two"), (), "0005.jpg"),
        ((".txt", b"\xff\xfe"), (), "0005.jpg"),
        ((".json", b'{"caption": "x"}'), (), "0005.jpg"),
        (None, [("0009.json", b'["odd"]')], "0009"),
        (None, [("0009.jpg", jpeg(9))], "0009.jpg"),
    ],
)
def test_images_without_labels_and_labels_without_image_are_refused_or_skipped(root, bad, more, named):
    def label(number: int) -> tuple[str, bytes]:
        return bad if bad and number == 5 else as_json(number)

    write_shard(root / "train-001.tar", range(4, 7), label=label, more=more)
    with pytest.raises(BadDataset, match=f"train-001.tar .*{named}"):
        build_splits("shards", **globs(root))
    for _ in range(2):  # read, and then from the cache
        splits = build_splits("shards", on_error="skip", **globs(root))
        assert len(splits.train) == (6 if bad else 7)
        [problem] = splits.problems
        assert problem.where.endswith(named)


def garble(file: Path) -> None:
    content = bytearray(file.read_bytes())
    with tarfile.open(file) as tar:
        second = tar.getmembers()[1]
    content[second.offset : second.offset + 512] = b"x" * 512
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: os.truncate(file, file.stat().st_size // 2),
        garble,
        lambda file: file.write_bytes(gzip.compress(file.read_bytes())),
        lambda file: file.write_bytes(b"no tar at all" * 100),
    ],
    ids=["truncated", "garbled", "compressed", "not a tar"],
)
def test_a_damaged_shard_is_refused(root, damage):
    damage(root / "train-001.tar")
    with pytest.raises(BadDataset, match=r"train-001\.tar"):
        build_splits("shards", **globs(root))


@pytest.mark.parametrize("part", range(1, 12))
def test_a_shard_cut_anywhere_is_never_half_read(root, part):
    file = root / "train-001.tar"
    whole = build_splits("shards", **globs(root))
    with tarfile.open(file) as tar:
        end = tar.getmembers()[-1].offset_data
    os.truncate(file, end * part // 12)
    try:
        splits = build_splits("shards", **globs(root))
    except BadDataset:
        return
    # A cut between two members cannot be told from a shorter shard; but then every image is whole.
    assert len(splits.train) < len(whole.train)
    for path in splits.train.paths:
        assert read_bytes(path) == jpeg(int(path.stem))


def test_overlapping_splits_and_wrong_patterns_are_refused(root):
    both = {"database": [f"{root}/database-*.tar", f"{root}/train-*.tar"]}
    assert sizes(build_splits("shards", train_in_database=True, **globs(root) | both)) == (2, 7, 12)
    assert sizes(build_splits("shards", train_in_database=True, **globs(root))) == (2, 7, 12)
    (root / "train-002.tgz").touch()
    for wrong, named in (
        (both, "7 .*train-000.tar"),
        ({"train": f"{root}/query-000.tar"}, "2 .*query-000.tar"),
        ({"query": f"{root}/nothing-*.tar"}, "nothing-"),
        ({"train": f"{root}/train-*"}, "train-002.tgz"),
    ):
        with pytest.raises(BadDataset, match=named):
            build_splits("shards", **globs(root) | wrong)


def test_a_path_of_a_file_is_no_member(tmp_path):
    for name in ("a.jpg", "a.tar", "a.tar::b.jpg", "a.tar::1+2", "a.zip::1+2/b.jpg"):
        assert find_member(tmp_path / name) is None
        assert stored_in(tmp_path / name) == tmp_path / name
