"""Lists of labelled images: every problem by line, good lines never lost to bad ones."""

import json

import pytest

from hashseek.retrieval.errors import BadDataset
from hashseek.retrieval.label_files import Problem, read_listing, read_rows


@pytest.fixture
def folder(tmp_path):
    for name in ("a.jpg", "b.jpg", "c, d.jpg", "ü ü.jpg"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def write(folder, text, name="labels.csv"):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def read(path, **options):
    return read_listing(path, **{"on_error": "skip", "need_labels": False, **options})


def test_a_good_list(folder):
    write(folder, 'file,labels,split\na.jpg,cat;dog,train\n"c, d.jpg",dog,query\nü ü.jpg,cat,retrieval\nb.jpg,cat,\n')
    listing = read(folder, on_error="stop")
    assert [(item.file, item.labels, item.split, item.line) for item in listing.items] == [
        ("a.jpg", ("cat", "dog"), "train", 2),
        ("c, d.jpg", ("dog",), "query", 3),
        ("ü ü.jpg", ("cat",), "database", 4),
        ("b.jpg", ("cat",), None, 5),
    ]
    assert listing.problems == ()
    assert read(folder / "labels.csv").items == listing.items


def test_the_same_as_jsonl(folder):
    rows = [{"file": "a.jpg", "labels": ["cat", "dog"]}, {"file": "b.jpg", "labels": "cat;dog", "split": "query"}]
    listing = read(write(folder, "\n".join(map(json.dumps, rows)) + "\n\n", "labels.jsonl"), on_error="stop")
    assert [item.labels for item in listing.items] == [("cat", "dog")] * 2
    assert [item.split for item in listing.items] == [None, "query"]


def test_a_byte_order_mark_and_windows_line_ends_are_no_problem(folder):
    (folder / "labels.csv").write_bytes(b"\xef\xbb\xbffile,labels\r\na.jpg,cat\r\n")
    assert [item.labels for item in read(folder, on_error="stop").items] == [("cat",)]


BAD_LINES = {
    "missing.jpg,cat,train": "missing.jpg does not exist",
    ",cat,train": "names no file",
    "a.jpg,cat,train": "listed before, in line 2",
    "b.jpg,cat,test": "its split is 'test'",
    "b.jpg,cat": "not the 3 fields",
    "b.jpg,cat,train,more": "not the 3 fields",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named_and_skipped_or_the_list_refused(folder, line):
    path = write(
        folder,
        f"file,labels,split\na.jpg,cat,train\n{line}\nc\N{COMMA} d.jpg,x,train\n".replace("c, d", '"c, d').replace(
            "d.jpg,x", 'd.jpg",x'
        ),
    )
    listing = read(path)
    assert [item.file for item in listing.items] == ["a.jpg", "c, d.jpg"]
    [problem] = listing.problems
    assert problem.skipped
    assert str(problem).startswith("labels.csv line 3: ")
    assert BAD_LINES[line] in problem.reason
    with pytest.raises(BadDataset, match=r"1 problem: labels\.csv line 3: "):
        read(path, on_error="stop")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("not json", "not JSON"),
        ("[1]", "not a JSON object"),
        pytest.param("[" * 100_000, "not JSON", id="too many brackets"),
        pytest.param('{"file": ' + "9" * 5000 + "}", "not JSON: a number of too many digits", id="too many digits"),
        ('{"labels": ["x"]}', "names no file"),
        ('{"file": 5}', "names no file"),
        ('{"file": "b.jpg", "labels": 5}', "its labels are 5, neither text nor a list"),
        ('{"file": "b.jpg", "labels": true}', "neither text nor a list"),
        ('{"file": "b.jpg", "labels": {"x": 1}}', "neither text nor a list"),
        ('{"file": "b.jpg", "split": ["train"]}', "its split is"),
        ('{"file": "nul\\u0000.jpg"}', "does not exist"),
        ('{"file": "\\ud800.jpg"}', "does not exist"),
    ],
)
def test_bad_lines_of_jsonl(folder, row, reason):
    listing = read(write(folder, f'{row}\n{{"file": "a.jpg", "labels": ["x"]}}\n', "labels.jsonl"))
    assert [item.file for item in listing.items] == ["a.jpg"]
    assert any(
        problem.skipped and reason in problem.reason and "line 1" in problem.where for problem in listing.problems
    )


def test_repairs_and_remarks_are_reported_but_skip_nothing(folder):
    path = write(folder, "file,labels,colour\na.jpg, cat ; dog;;cat,red\nb.jpg,,blue\n")
    listing = read(path)
    assert [item.labels for item in listing.items] == [("cat", "dog"), ()]
    assert not any(problem.skipped for problem in listing.problems)
    reasons = " | ".join(str(problem) for problem in listing.problems)
    for part in ("line 1: unknown column 'colour'", "line 2: stray spaces", "line 3: b.jpg has no label"):
        assert part in reasons
    assert [item.file for item in read(path, need_labels=True).items] == ["a.jpg"]
    assert not [p for p in read(path, ignore_columns=("colour",)).problems if "colour" in p.reason]


def test_labels_can_be_left_out_by_pattern(folder):
    path = write(folder, "file,labels\na.jpg,sky;sky_r1\nb.jpg,sea_r1\n")
    assert [item.labels for item in read(path, drop_labels=("*_r1",)).items] == [("sky",), ()]
    with pytest.raises(BadDataset, match="no label"):
        read(path, drop_labels=("nothing_*",))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no column `file`: its first line must name it, and is empty$"),
        (b"name,labels\na.jpg,x\n", "no column `file`: its first line must name it, and names `name`, `labels`$"),
        (b"file,labels\n\xff\xfe.jpg,x\n", "not UTF-8"),
        (b"file,labels,file\na.jpg,x,b.jpg\n", "names the column `file` twice in its first line"),
        (b'"file,labels\na.jpg,x\n', "line 1 is not CSV: unexpected end of data; it must name the columns"),
    ],
)
def test_what_is_no_list_is_refused(folder, content, reason):
    (folder / "labels.csv").write_bytes(content)
    with pytest.raises(BadDataset, match=reason):
        read(folder)


OPEN_QUOTES = {
    "in the first column": ('"a.jpg,cat,', "it is not CSV: ',' expected after '\"'; it goes on to line 4"),
    "before the labels": ('a.jpg,"cat,', "it is not CSV: ',' expected after '\"'; it goes on to line 4"),
    "in the last column": ('a.jpg,cat,"a dog', "it is not CSV: ',' expected after '\"'; it goes on to line 4"),
}


@pytest.mark.parametrize("place", OPEN_QUOTES)
def test_a_quote_that_is_left_open_costs_the_lines_up_to_the_next_and_they_are_named(folder, place):
    row, reason = OPEN_QUOTES[place]
    path = write(folder, f'file,labels,title\n{row}\nb.jpg,dog,\n"c, d.jpg",cat,"x"\nü ü.jpg,cat,\n')
    listing = read(path, ignore_columns=("title",))
    assert [(item.file, item.line) for item in listing.items] == [("ü ü.jpg", 5)]
    [problem] = listing.problems
    assert problem.skipped
    assert str(problem).startswith(f"labels.csv line 2: {reason}, and all these lines are left out: is a quote left")
    with pytest.raises(BadDataset, match=r"1 problem: labels\.csv line 2: .* is a quote left open in line 2\?"):
        read(path, on_error="stop", ignore_columns=("title",))


def test_a_quote_that_is_left_open_to_the_end_leaves_out_what_it_took(folder):
    listing = read(write(folder, 'file,labels\na.jpg,cat\nb.jpg,"dog\nc.jpg,x\n'))
    assert [item.file for item in listing.items] == ["a.jpg"]
    assert [str(problem) for problem in listing.problems] == [
        "labels.csv line 3: it is not CSV: unexpected end of data; it goes on to line 4, and all these lines are left "
        "out: is a quote left open in line 3?"
    ]


def test_a_row_that_is_too_long_costs_only_what_was_read_of_it(folder):
    """Python's reader takes 131,072 characters of a field."""
    rows = [f"none{i:05}.jpg,{'x' * 88}" for i in range(2000)]
    listing = read(write(folder, "\n".join(["file,labels", 'a.jpg,"cat', *rows, "b.jpg,dog", ""])))
    assert [item.file for item in listing.items] == ["b.jpg"]
    first = str(listing.problems[0])
    assert first.startswith("labels.csv line 2: it is not CSV: field larger than field limit (131072); it goes on to")
    last = int(first.split("goes on to line ")[1].split(",")[0])
    assert [int(str(p).split("line ")[1].split(":")[0]) for p in listing.problems[1:]] == [*range(last + 1, 2003)]
    [problem] = read(write(folder, f"file,labels\na.jpg,{'x' * 200_000}\nb.jpg,dog\n")).problems
    assert str(problem) == "labels.csv line 2: it is not CSV: field larger than field limit (131072)"


def test_labels_have_one_line_and_paths_and_other_columns_as_many_as_they_like(folder):
    (folder / "two\nlines.jpg").write_bytes(b"x")
    text = 'file,labels,title\n"two\nlines.jpg",cat,"a\nb"\na.jpg,"cat\nb.jpg,dog",\nb.jpg,dog,5" of it\n'
    listing = read(write(folder, text), ignore_columns=("title",))
    assert [(item.file, item.line) for item in listing.items] == [("two\nlines.jpg", 2), ("b.jpg", 7)]
    assert [str(problem) for problem in listing.problems] == [
        "labels.csv line 5: its labels go over several lines; it goes on to line 6, and all these lines are left out: "
        "is a quote left open in line 5?"
    ]


def test_places_without_a_list_are_refused(tmp_path):
    (tmp_path / "labels.txt").write_text("x")
    for path, reason in (
        (tmp_path, r"neither labels\.csv nor labels\.jsonl"),
        (tmp_path / "missing", "no folder or list"),
        (tmp_path / "labels.txt", r"must be a \.csv or \.jsonl"),
    ):
        with pytest.raises(BadDataset, match=reason):
            read(path)


def test_an_empty_list_has_no_items(folder):
    assert read(write(folder, "file,labels\n"), on_error="stop").items == ()


def test_many_problems_are_counted_and_some_shown(folder):
    path = write(folder, "file,labels\n" + "".join(f"missing{i}.jpg,x\n" for i in range(50)))
    with pytest.raises(BadDataset, match=r"50 problems: .*; and 45 more \(mend the list"):
        read(path, on_error="stop")


def test_rows_are_read_one_by_one_and_what_is_no_utf_8_as_file_names_are(folder):
    (folder / "labels.jsonl").write_bytes(b'{"file": "a.jpg"}\n{"file": "\xff.jpg"}\n{"torn\n')
    rows = read_rows(folder / "labels.jsonl", one_of=("file",), errors="surrogateescape")
    assert next(rows) == (1, {"file": "a.jpg"})
    (folder / "labels.jsonl").unlink()  # what is drawn later is still to be read
    assert next(rows) == (2, {"file": "\udcff.jpg"})
    assert isinstance(next(rows), Problem)
    with pytest.raises(BadDataset, match=r"labels\.csv cannot be read: No such file"):
        list(read_rows(folder / "labels.csv", one_of=("file",), errors="strict"))
    (folder / "labels.csv").write_bytes("file,labels\na.jpg,x\n".encode("utf-16"))
    with pytest.raises(BadDataset, match="is not UTF-8 text: save the list as UTF-8"):
        list(read_rows(folder / "labels.csv", one_of=("path", "file"), errors="surrogateescape"))
    write(folder, "name,labels\n")
    with pytest.raises(BadDataset, match="no column `path` or `file`: its first line must name one of them, and names"):
        list(read_rows(folder / "labels.csv", one_of=("path", "file"), errors="strict"))
