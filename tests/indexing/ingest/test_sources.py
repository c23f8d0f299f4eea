"""Finding images for `index add`: folders, glob patterns, lists and tars; every problem is reported."""

import gzip
import json
import os

import pytest

from hashseek.indexing.ingest.manifests import ImageSource
from hashseek.indexing.ingest.sources import count_images, describe, find_sources, walk
from hashseek.indexing.uris import is_there, open_uri, stored_path
from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.label_files import Problem
from support.dataset_files import write_tar
from support.pictures import draw, encoded


def jpeg(seed):
    return encoded(draw(seed), "JPEG")


def touch(path, content=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def drawn(*paths, split=None):
    """(sources, problems as text) that the paths give."""
    found = list(find_sources(paths, split=split))
    sources = [one for one in found if isinstance(one, ImageSource)]
    return sources, [str(one) for one in found if isinstance(one, Problem)]


def names(folder, *patterns):
    sources, problems = drawn(*(str(folder / pattern) for pattern in patterns))
    assert problems == []
    return [str(source.uri.relative_to(folder)) for source in sources]


# ---------------------------------------------------------------- folders and patterns


@pytest.fixture
def tree(tmp_path):
    for name in ("a/1.jpg", "a/2.png", "a/deep/3.jpg", "b/4.jpg", "b/notes.md", ".hidden/5.jpg", "[c]/6.jpg", "7.jpg"):
        touch(tmp_path / "tree" / name)
    return tmp_path / "tree"


def test_patterns(tree):
    assert names(tree, "*.jpg") == ["7.jpg"]
    assert names(tree, "a/*") == ["a/1.jpg", "a/2.png", "a/deep/3.jpg"]  # a folder that matches is searched
    assert names(tree, "?/*.jpg") == ["a/1.jpg", "b/4.jpg"]
    assert names(tree, "[ab]/*.jpg") == ["a/1.jpg", "b/4.jpg"]
    assert names(tree, "**/*.jpg") == ["7.jpg", "[c]/6.jpg", "a/1.jpg", "a/deep/3.jpg", "b/4.jpg"]
    assert names(tree, "**/**/deep/*") == ["a/deep/3.jpg"]
    assert names(tree, "b/*") == ["b/4.jpg"]  # what is no image is left out, as in a folder
    assert names(tree, "[c]/6.jpg") == ["[c]/6.jpg"]  # a file of that name comes before the pattern
    assert names(tree, "a/**") == ["a/1.jpg", "a/2.png", "a/deep/3.jpg"]
    assert names(tree, "a/**/*") == ["a/1.jpg", "a/2.png", "a/deep/3.jpg"]  # each once, although `a/deep` matches, too
    for pattern in ("*.gif", "none/*", "**/none", "7.jpg/*"):
        with pytest.raises(BadDataset):
            find_sources([str(tree / pattern)])


def test_links_in_a_circle_end_and_links_to_folders_are_not_followed(tree):
    (tree / "a" / "up").symlink_to(tree)
    (tree / "self").symlink_to(".")
    assert names(tree, "**/*.jpg") == ["7.jpg", "[c]/6.jpg", "a/1.jpg", "a/deep/3.jpg", "b/4.jpg"]
    assert len(list(walk(tree))) == 6
    assert names(tree, "a/up/b/*") == ["a/up/b/4.jpg"]  # unless they are named


def test_hidden_folders_are_left_out_unless_they_are_named(tree, monkeypatch):
    for hidden in (".hidden/.trash/8.jpg", "a/.thumbnails/1.jpg", "a/.1.jpg"):
        touch(tree / hidden)
    assert names(tree, "a") == ["a/1.jpg", "a/2.png", "a/deep/3.jpg"]
    assert names(tree, ".hidden") == names(tree, ".hidden/*") == [".hidden/5.jpg"]
    monkeypatch.chdir(tree)
    assert len(drawn(".")[0]) == 6
    for refuse in (find_sources, count_images):
        with pytest.raises(BadDataset):
            refuse(["7.jpg", ""])  # an empty path is not the current folder


def test_what_may_not_be_read_is_skipped_in_a_folder_and_refused_as_an_argument(hashseek, own_collection, tmp_path):
    for number, name in enumerate(("open.png", "closed/1.png")):
        (tmp_path / "all" / name).parent.mkdir(exist_ok=True, parents=True)
        draw(70 + number).save(tmp_path / "all" / name)
    unreadable = touch(tmp_path / "unreadable.csv", b"file\nall/open.png\n")
    unreadable.chmod(0)
    closed = tmp_path / "all" / "closed"
    closed.chmod(0)
    rights = {"before": "drop_rights()"}
    try:
        code, out, err = hashseek("index", "add", own_collection, tmp_path / "all", "--device", "cpu", **rights)
        refused = [hashseek("index", "add", own_collection, path, **rights) for path in (closed / "1.png", unreadable)]
    finally:
        closed.chmod(0o755)
    assert (code, out.split(";")[0]) == (0, "added 1, already stored 0, skipped 1")
    assert err.startswith(f"skipped: {closed}: ")
    assert [(code, err.count("\n"), "Permission denied" in err) for code, _, err in refused] == [(2, 1, True)] * 2


def test_a_folder_of_more_files_than_are_sorted_together_gives_each_once(tmp_path, monkeypatch):
    monkeypatch.setattr("hashseek.indexing.ingest.sources._CHUNK", 10)
    for number in range(95):
        touch(tmp_path / f"{number:03}.jpg")
    for number in range(25):
        touch(tmp_path / f"sub {number:02}" / "x.jpg")
    found = [str(path.relative_to(tmp_path)) for path in walk(tmp_path)]
    assert len(found) == len(set(found)) == 120
    assert found[95:] == [f"sub {number:02}/x.jpg" for number in range(25)]


def test_a_note_does_not_stop_what_a_bad_line_stops(tree):
    touch(tree / "list.csv", b'file,labels\n7.jpg,"dog, brown"\n')
    assert count_images([tree / "list.csv"], on_error="stop") == 1
    touch(tree / "list.csv", b"file,labels\nmissing.jpg,dog\n")
    with pytest.raises(BadDataset):
        count_images([tree / "list.csv"], on_error="stop")


def test_labels_and_keys_are_added(tree):
    touch(tree / "list.jsonl", b'{"file": "7.jpg", "labels": ["own"], "key": "k"}\n')
    [listed] = describe(find_sources([tree / "list.jsonl"]), labels=["own", "more"], key_from="path")
    assert (listed.labels, listed.key) == (("own", "more"), "k")
    [by_path] = describe(find_sources([tree / "7.jpg"]), key_from="path")
    [by_name] = describe(find_sources(["https://example.org/a/b%20c.jpg?x=1"]), key_from="name")
    assert (by_path.key, by_name.key) == (os.path.realpath(tree / "7.jpg"), "b%20c.jpg?x=1")
    write_tar(tree / "a.tar", {"d/x.jpg": b"x"})
    [member] = describe(find_sources([tree / "a.tar"]), key_from="path")
    assert member.key == os.path.realpath(tree / "a.tar") + "::d/x.jpg"  # whatever the tar is rewritten to


# ---------------------------------------------------------------- lists


def test_a_list_brings_keys_labels_and_every_other_column_as_attribute(tree):
    touch(
        tree / "m.csv", b"path,labels,key,year,ratio,code,empty\na/1.jpg,x;y,k 1,2015,0.5,007,\nb/4.jpg,,,1e3,-3,a,\n"
    )
    sources, problems = drawn(tree / "m.csv")
    assert problems == []
    assert [(s.uri, s.labels, s.key, s.where) for s in sources] == [
        (tree / "a/1.jpg", ("x", "y"), "k 1", "m.csv line 2"),
        (tree / "b/4.jpg", (), None, "m.csv line 3"),
    ]
    # A number is one only if it is written as JSON writes numbers: 007 is a name.
    assert [s.attributes for s in sources] == [
        {"year": 2015, "ratio": 0.5, "code": "007"},
        {"year": "1e3", "ratio": -3, "code": "a"},
    ]


def test_columns_are_known_in_any_case(tree):
    touch(tree / "m.csv", b"File,ID,Labels,Year\na/1.jpg,k1,x,2015\n")
    [source], _ = drawn(tree / "m.csv")
    assert (source.key, source.labels, source.attributes) == ("k1", ("x",), {"Year": 2015})


def test_jsonl_keeps_types_and_nesting_and_id_is_the_key_unless_there_is_one(tree):
    rows = [
        {"uri": "7.jpg", "id": 5, "camera": {"model": "X"}, "tags": [1], "ok": True, "none": None},
        {"uri": "7.jpg", "id": 5, "key": "k", "attributes": {"year": 1}, "year": 2, "split": "of another program"},
        {"uri": "https://example.org/x.jpg", "labels": ["a", 7]},
    ]
    touch(tree / "m.jsonl", "\n".join(map(json.dumps, rows)).encode())
    sources, problems = drawn(tree / "m.jsonl")
    assert problems == []
    assert [(s.key, s.attributes) for s in sources] == [
        ("5", {"camera": {"model": "X"}, "tags": [1], "ok": True}),
        ("k", {"id": 5, "year": 1}),
        (None, {}),
    ]
    assert (sources[2].uri, sources[2].labels) == ("https://example.org/x.jpg", ("a", "7"))


def test_parquet(tree):
    pa = pytest.importorskip("pyarrow")
    import datetime
    import decimal

    import pyarrow.parquet as pq

    table = pa.table(
        {
            "uri": ["7.jpg", "none.jpg"],
            "labels": [["a", "b"], []],
            "key": ["k", None],
            "day": [datetime.date(2026, 11, 21), None],
            "n": [3, 4],
            "x": [float("nan"), 1.0],
            "narrow": pa.array([0.7, 1.0], pa.float32()),
            "price": [decimal.Decimal("9.90"), None],
            "times": [[datetime.time(9, 30)], []],
            "modified": pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns")),
            "late": pa.array([1, None], pa.time64("ns")),
        }
    )
    pq.write_table(table, tree / "m.parquet")
    [source], problems = drawn(tree / "m.parquet")
    assert (source.labels, source.key, source.attributes) == (
        ("a", "b"),
        "k",
        {
            "day": "2026-11-21",
            "n": 3,
            "narrow": 0.7,
            "price": 9.9,
            "times": ["09:30:00"],
            "modified": "2023-11-14T22:13:20.123456",
            "late": "00:00:00",
        },
    )
    assert [problem.partition(":")[0] for problem in problems] == ["m.parquet line 2"]
    (tree / "m.parquet").write_bytes((tree / "m.parquet").read_bytes()[:-20])
    with pytest.raises(BadDataset, match=r"m\.parquet"):
        drawn(tree / "m.parquet")
    pq.write_table(pa.table({"uri": ["7.jpg"], "day": pa.array([2**22], pa.date32())}), tree / "m.parquet")
    with pytest.raises(BadDataset, match=r"m\.parquet"):  # in the year 13453
        drawn(tree / "m.parquet")
    pq.write_table(pa.table({"name": ["7.jpg"]}), tree / "m.parquet")
    with pytest.raises(BadDataset, match="uri or path or file or url"):
        drawn(tree / "m.parquet")


def test_a_text_file_of_urls_and_files(tree):
    touch(tree / "urls.txt", "\ufeff# of today\n\nhttps://example.org/ü.jpg\na/1.jpg\r\nftp://example.org/x\n".encode())
    sources, problems = drawn(tree / "urls.txt")
    assert [source.uri for source in sources] == ["https://example.org/ü.jpg", tree / "a/1.jpg"]
    [problem] = problems
    assert problem.startswith("urls.txt line 5: ftp://example.org/x ")


BAD_ROWS = [
    '{"file": "7.jpg", "labels"',  # cut off
    "[" * 100_000,
    '{"file": 5}',
    '{"path": " "}',
    '{"file": "7.jpg", "key": 1.5}',
    '{"file": "7.jpg", "labels": 3}',
    '{"file": "7.jpg", "attributes": [1]}',
    '{"file": "7.jpg", "attributes": "{"}',
    '{"file": "gone.jpg"}',
    '{"file": "nul\\u0000.jpg"}',
    '{"file": "x.tar::0+5/a.jpg"}',
    '{"file": "s3://bucket/x.jpg"}',
    b'{"file": "gone \xff.jpg"}',
]


def test_each_bad_row_is_named_and_the_others_are_read(tree):
    rows = [
        row if isinstance(row, bytes) else row.encode()
        for row in ('{"file": "7.jpg"}', *BAD_ROWS, '{"file": "a/1.jpg"}')
    ]
    touch(tree / "m.jsonl", b"\n".join(rows))
    sources, problems = drawn(tree / "m.jsonl")
    assert [source.where for source in sources] == ["m.jsonl line 1", f"m.jsonl line {len(rows)}"]
    assert [problem.partition(":")[0] for problem in problems] == [f"m.jsonl line {n}" for n in range(2, len(rows))]


def test_a_split_of_another_program_matters_only_if_a_split_is_chosen(tree):
    rows = [{"file": "7.jpg", "split": "tune"}, {"file": "a/1.jpg", "split": "train"}]
    touch(tree / "m.jsonl", "\n".join(map(json.dumps, rows)).encode())
    assert [len(found) for found in drawn(tree / "m.jsonl")] == [2, 0]
    assert [len(found) for found in drawn(tree / "m.jsonl", split="train")] == [1, 1]


def test_a_split_whose_images_are_all_missing_is_not_called_empty(tree):
    touch(tree / "m.csv", b"file,split\nnone.jpg,train\n7.jpg,query\n,query\n7.jpg,odd\n")
    assert [len(found) for found in drawn(tree / "m.csv", split="train")] == [0, 3]
    with pytest.raises(BadDataset):
        drawn(tree / "m.csv", split="database")


@pytest.mark.parametrize("path", ["a", "7.jpg", "*.jpg", "https://example.org/1.jpg"])
def test_a_split_of_what_has_none_is_refused(tree, path):
    with pytest.raises(BadDataset):
        drawn(path if "://" in path else str(tree / path), split="train")


def test_names_from_windows_are_found(tree):
    touch(tree / "m.csv", b"file\na\\1.jpg\n")
    [source], _ = drawn(tree / "m.csv")
    assert source.uri == tree / "a" / "1.jpg"


# ---------------------------------------------------------------- tars


def test_images_in_a_tar_with_metadata_from_the_files_beside_them(tmp_path):
    metadata = {"labels": ["cat"], "key": "k0", "year": 2015}
    shard = write_tar(
        tmp_path / "a.tar",
        {
            "x/0.jpg": jpeg(0),
            "x/0.json": json.dumps(metadata).encode(),
            "x/1.txt": b"dog; brown\n",
            "x/1.jpg": jpeg(1),
            "x/2.cls": b"3 5",
            "x/2.jpg": jpeg(2),
            "x/3.json": b"{",
            "x/3.jpg": jpeg(3),
            "x/4.tar::1+2/4.jpg": jpeg(4),
            "x/.5.jpg": jpeg(5),
            "readme": b"text",
            "x/1.cls": b"3",  # its picture stands further above
            "x/6.json": json.dumps({"labels": [], "split": "test"}).encode(),
            "x/6.cls": b"7",
            "x/6.jpg": jpeg(6),
            "x/7.json": json.dumps({"labels": ["cat", 1.5], "split": "train"}).encode(),
            "x/7.jpg": jpeg(7),
        },
    )
    sources, problems = drawn(shard)
    assert [(s.name, s.labels, s.key, s.attributes) for s in sources] == [
        ("a.tar: x/0.jpg", ("cat",), "k0", {"year": 2015}),
        ("a.tar: x/1.jpg", ("dog", "brown"), None, {}),
        ("a.tar: x/2.jpg", ("3", "5"), None, {}),
        ("a.tar: x/4.tar::1+2/4.jpg", (), None, {}),
        ("a.tar: x/6.jpg", ("7",), None, {}),
        ("a.tar: x/7.jpg", ("cat",), None, {}),
    ]
    assert [problem.split(": ")[1] for problem in problems] == ["x/3.jpg", "x/1.cls", "x/7.jpg"]
    assert [s.name for s in drawn(shard, split="query")[0]] == ["a.tar: x/6.jpg"]
    for source, number in zip(sources, (0, 1, 2, 4, 6, 7), strict=True):
        path = stored_path(source.uri)
        assert path.startswith(f"{os.path.realpath(shard)}::")
        assert open_uri(path) == jpeg(number)
        assert is_there(path)
    assert [s.uri for s in drawn(str(tmp_path / "*.tar"))[0]] == [s.uri for s in sources]
    shard.unlink()
    assert not is_there(path)


def test_a_damaged_tar_gives_its_whole_members_and_a_problem(tmp_path):
    shard = write_tar(tmp_path / "a.TAR", {f"{number}.jpg": jpeg(number) for number in range(5)})
    content = shard.read_bytes()
    sources, _ = drawn(shard)
    shard.write_bytes(content[: content.index(jpeg(3)) + 100])
    cut, problems = drawn(shard)
    assert [s.uri for s in cut] in ([s.uri for s in sources[:3]], [s.uri for s in sources[:4]])
    assert [problem.partition(":")[0] for problem in problems] == [str(shard)]
    for damaged in (content[:2048] + b"garbage" * 400, gzip.compress(content), b""):
        shard.write_bytes(damaged)
        assert [problem.partition(":")[0] for problem in drawn(shard)[1]] == [str(shard)]
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(content))
    assert [problem.partition(":")[0] for problem in drawn(tmp_path / "b.tar.gz")[1]] == [str(tmp_path / "b.tar.gz")]


def test_a_path_without_images_is_named(tree):
    (tree / "empty").mkdir()
    write_tar(tree / "empty.tar", {})
    paths = [str(tree / name) for name in ("b/*.md", "empty", "empty.tar")]
    found = list(find_sources([paths[0], str(tree / "b"), *paths[1:]]))
    assert [one.where for one in found if isinstance(one, Problem)] == paths
    assert not any(one.skipped for one in found if isinstance(one, Problem))


def test_a_problem_tells_whether_the_file_is_missing(tmp_path):
    touch(tmp_path / "a.jpg")
    rows = {"gone.jpg": True, str(tmp_path / "gone.jpg"): True, "s3://b/a.jpg": False, "a.jpg": False}
    (tmp_path / "list.jsonl").write_text("".join(json.dumps({"file": f, "labels": 1}) + "\n" for f in rows))
    found = list(find_sources([tmp_path / "list.jsonl"]))
    assert [problem.missing for problem in found] == list(rows.values())
