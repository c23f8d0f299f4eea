"""CSV that can be read back; where caches are."""

import csv
import io
from pathlib import Path

import pytest

from hashseek.retrieval.files import as_csv, cache_folder


@pytest.mark.parametrize("own", ["", "/own"])
@pytest.mark.parametrize("common", ["", "/common"])
def test_an_empty_variable_counts_as_not_set(own, common, monkeypatch):
    monkeypatch.setenv("HASHSEEK_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", common)
    assert cache_folder() == Path(own or f"{common or Path.home() / '.cache'}/hashseek")


def test_csv_keeps_all_digits_and_any_file_name():
    rows = [["name", "value"], ["b\udcffd", 0.1 + 0.2], ["a\rb", 1.0], ['c\r\n, "d"\r\n', 2.0]]
    content = as_csv(rows)
    assert b"b\xffd" in content
    assert content.startswith(b"name,value\n")
    text = io.StringIO(content.decode(errors="surrogateescape"), newline="")
    assert list(csv.reader(text)) == [[str(cell) for cell in row] for row in rows]
