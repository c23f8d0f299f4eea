"""Label files: every problem is named by its line, and good lines are never lost to bad ones."""

import json

import pytest

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.label_files import (
    Problem,
    find_label_file,
    parse_split,
    read_label_file,
    read_rows,
    refuse,
    write_label_file,
)


@pytest.fixture
def folder(tmp_path):
    for name in ("a.jpg", "b.jpg", "c, d.jpg", "ü ü.jpg"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def write(folder, text, name="labels.csv"):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_a_good_list(folder):
    path = write(
        folder, 'file,labels,split\na.jpg,cat;dog,train\n"c, d.jpg",dog,query\nü ü.jpg,cat,retrieval\nb.jpg,c,\n'
    )
    found = read_label_file(path)
    assert [(item.file, item.labels, item.split, item.line) for item in found.items] == [
        ("a.jpg", ("cat", "dog"), "train", 2),
        ("c, d.jpg", ("dog",), "query", 3),
        ("ü ü.jpg", ("cat",), "database", 4),
        ("b.jpg", ("c",), None, 5),
    ]
    assert found.problems == ()
    assert find_label_file(folder) == find_label_file(path) == path


def test_what_was_written_is_read_back(folder):
    names = ("a.jpg", "c, d.jpg", "a\rb.jpg", "a\nb.jpg")
    rows = [(name, ("cat", "big, dog"), "train") for name in names]
    for name in names:
        (folder / name).write_bytes(b"x")
    write_label_file(folder / "labels.csv", rows)
    found = read_label_file(folder / "labels.csv")
    assert [(item.file, item.labels, item.split) for item in found.items] == rows
    assert found.problems == ()


def test_the_same_as_jsonl(folder):
    rows = [{"file": "a.jpg", "labels": ["cat, big", "dog"]}, {"file": "b.jpg", "labels": "cat;dog", "split": "test"}]
    found = read_label_file(write(folder, "\n".join(map(json.dumps, rows)) + "\n\n", "labels.jsonl"))
    assert [(item.labels, item.split) for item in found.items] == [
        (("cat, big", "dog"), None),
        (("cat", "dog"), "query"),
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbffile,labels\r\nsub/a.jpg,cat\r\n",  # a byte order mark and Windows line ends
        b" File ,LABELS\nsub/a.jpg,cat\n",
        b"file, labels, split\nsub/a.jpg, cat ,\n",
        b",file,labels,\n0,sub/a.jpg,cat,\n",  # the index of pandas, and a comma at the end
        b'file,labels\nsub/a.jpg,"[""cat""]"\n',
        b"file,labels\nsub\\a.jpg,cat\n",  # a Windows path
    ],
)
def test_variants_of_other_programs_are_read(folder, content):
    (folder / "sub").mkdir()
    (folder / "sub" / "a.jpg").write_bytes(b"x")
    (folder / "labels.csv").write_bytes(content)
    [item] = read_label_file(folder / "labels.csv").items
    assert (item.file, item.labels, item.path) == ("sub/a.jpg", ("cat",), folder / "sub/a.jpg")


def test_the_usual_names_of_splits_are_known():
    assert [parse_split(name)[0] for name in ("Train", " test", "validation", "retrieval")] == [
        *("train", "query", "query", "database")
    ]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("missing.jpg,cat,train", "missing.jpg"),
        ("x" * 300 + ".jpg,cat,train", "x.jpg"),
        (",cat,train", "not name"),
        ("a.jpg,cat,train", "line 2"),  # where it was listed before
        ("./a.jpg,cat,train", "line 2"),
        ("b.jpg,,train", "b.jpg"),
        ("b.jpg,cat,gallery", "gallery"),
        ("b.jpg,cat", "2"),
        ("b.jpg,cat,train,more", "4"),
    ],
)
def test_a_bad_line_is_named_and_skipped_or_the_list_refused(folder, line, named):
    path = write(folder, f'file,labels,split\na.jpg,cat,train\n{line}\n"c, d.jpg",x,train\n')
    found = read_label_file(path)
    assert [item.file for item in found.items] == ["a.jpg", "c, d.jpg"]
    [problem] = found.problems
    assert problem.skipped
    assert problem.where == "labels.csv line 3"
    assert named in problem.reason
    assert problem.missing == (named in ("missing.jpg", "x.jpg"))
    with pytest.raises(BadDataset, match="line 3"):
        refuse(path, found.problems)


@pytest.mark.parametrize(
    "row",
    [
        "not json",
        "[1]",
        pytest.param("[" * 100_000, id="too many brackets"),
        pytest.param('{"file": ' + "9" * 5000 + "}", id="too many digits"),
        '{"labels": ["x"]}',
        '{"file": 5}',
        '{"file": "b.jpg", "labels": {"x": 1}}',
        '{"file": "b.jpg", "labels": "x", "split": ["train"]}',
        '{"file": "nul\\u0000.jpg"}',
        '{"file": "\\ud800.jpg"}',
    ],
)
def test_bad_lines_of_jsonl(folder, row):
    found = read_label_file(write(folder, f'{row}\n{{"file": "a.jpg", "labels": ["x"]}}\n', "labels.jsonl"))
    assert [item.file for item in found.items] == ["a.jpg"]
    assert {problem.where for problem in found.problems} == {"labels.jsonl line 1"}
    assert any(problem.skipped for problem in found.problems)


def test_corrections_are_reported_but_skip_nothing(folder):
    path = write(folder, 'file,labels,label\na.jpg, cat ; dog;;cat,red\nb.jpg,"dog, cat",blue\n')
    found = read_label_file(path)
    assert [item.labels for item in found.items] == [("cat", "dog"), ("dog, cat",)]
    unknown, comma = found.problems
    assert not any(problem.skipped for problem in found.problems)
    assert "'labels'" in unknown.reason
    assert "'dog, cat'" in comma.reason
    assert read_label_file(path, ignore_columns=("label",)).problems == (comma,)
    several = read_label_file(write(folder, "file,labels,year,Straße\na.jpg,cat,1,2\n")).problems
    assert [('["year", "Straße"]' in problem.reason, problem.skipped) for problem in several] == [(True, False)]


def test_what_is_no_label_in_a_list_is_left_out_and_reported(folder):
    found = read_label_file(
        write(folder, '{"file": "a.jpg", "labels": ["cat", null, 1, {"x": 1}, true, 1.0]}\n', "labels.jsonl")
    )
    assert [item.labels for item in found.items] == [("cat", "1")]  # true and 1.0 are equal to 1
    assert [problem.skipped for problem in found.problems] == [False]


def test_a_cell_that_only_begins_like_a_json_list_is_one_label_and_reported(folder):
    cell = "[" * 100_000
    found = read_label_file(write(folder, f"file,labels\na.jpg,{cell}\nb.jpg,[x\n"))
    assert [item.labels for item in found.items] == [(cell,), ("[x",)]
    assert [problem.skipped for problem in found.problems] == [False, False]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"name,labels\na.jpg,x\n",
        b"file;labels\na.jpg;dog\n",
        b"file\tlabels\na.jpg\tdog\n",
        b"file,labels\n\xff\xfe.jpg,x\n",
        "file,labels\na.jpg,x\n".encode("utf-16"),
        b"file,labels,File\na.jpg,x,b.jpg\n",
        b'"file,labels\na.jpg,x\n',
    ],
)
def test_a_file_that_is_no_list_is_refused(folder, content):
    (folder / "labels.csv").write_bytes(content)
    with pytest.raises(BadDataset):
        read_label_file(folder / "labels.csv")


@pytest.mark.parametrize("row", ['"a.jpg,cat,', 'a.jpg,"cat,', 'a.jpg,cat,"a dog'])
def test_an_open_quote_skips_the_lines_up_to_the_next_quote(folder, row):
    path = write(folder, f'file,labels,title\n{row}\nb.jpg,dog,\n"c, d.jpg",cat,"x"\nü ü.jpg,cat,\n')
    found = read_label_file(path, ignore_columns=("title",))
    assert [(item.file, item.line) for item in found.items] == [("ü ü.jpg", 5)]
    [problem] = found.problems
    assert problem.skipped
    assert "lines 2 to 4" in problem.reason
    # Without another quote the rest of the file is skipped.
    found = read_label_file(write(folder, 'file,labels\na.jpg,cat\nb.jpg,"dog\nc.jpg,x\n'))
    assert [item.file for item in found.items] == ["a.jpg"]
    assert "lines 3 to 4" in found.problems[0].reason


def test_a_field_that_is_too_long_skips_only_its_row(folder):
    [problem] = read_label_file(write(folder, f"file,labels\na.jpg,{'x' * 200_000}\nb.jpg,dog\n")).problems
    assert problem.where == "labels.csv line 2"


def test_labels_have_one_line_and_other_columns_as_many_as_they_like(folder):
    (folder / "two\nlines.jpg").write_bytes(b"x")
    text = 'file,labels,title\n"two\nlines.jpg",cat,"a\nb"\na.jpg,"cat\nb.jpg,dog",\nb.jpg,dog,5" of it\n'
    found = read_label_file(write(folder, text), ignore_columns=("title",))
    assert [(item.file, item.line) for item in found.items] == [("two\nlines.jpg", 2), ("b.jpg", 7)]
    assert [problem.where for problem in found.problems] == ["labels.csv line 5"]


def test_a_folder_without_a_list_gives_none_and_other_files_are_refused(tmp_path):
    assert find_label_file(tmp_path) is None
    (tmp_path / "labels.txt").write_text("x")
    for path in (tmp_path / "missing.csv", tmp_path / "labels.txt"):
        with pytest.raises(BadDataset):
            find_label_file(path)


def test_many_problems_are_counted_and_some_shown(folder):
    path = write(folder, "file,labels\n" + "".join(f"missing{i}.jpg,x\n" for i in range(50)))
    with pytest.raises(BadDataset, match=r"50 .* 45 more"):
        refuse(path, read_label_file(path).problems)


def test_rows_are_read_one_by_one_and_names_need_not_be_utf_8(folder):
    (folder / "labels.jsonl").write_bytes(b'{"file": "a.jpg"}\n{"file": "\xff.jpg"}\n{"torn\n')
    rows = read_rows(folder / "labels.jsonl", one_of=("file",), errors="surrogateescape")
    assert next(rows) == (1, {"file": "a.jpg"})
    assert next(rows) == (2, {"file": "\udcff.jpg"})
    assert isinstance(next(rows), Problem)
    (folder / "labels.csv").write_bytes("file,labels\na.jpg,x\n".encode("utf-16"))
    for missing_or_utf_16 in ("nowhere.csv", "labels.csv"):
        with pytest.raises(BadDataset):
            list(read_rows(folder / missing_or_utf_16, one_of=("path", "file"), errors="surrogateescape"))
