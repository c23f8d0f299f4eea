"""Files are replaced atomically; CSV that can be read back; where caches are."""

import csv
import io
import os
from pathlib import Path

import pytest

from hashseek.retrieval.files import as_csv, cache_folder, write_atomically


@pytest.mark.parametrize("own", ["", "/own"])
@pytest.mark.parametrize("common", ["", "/common"])
def test_an_empty_variable_counts_as_not_set(own, common, monkeypatch):
    monkeypatch.setenv("HASHSEEK_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", common)
    assert cache_folder() == Path(own or f"{common or Path.home() / '.cache'}/hashseek")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_user_without_a_home_folder_is_told_what_to_set(start):
    code = """
import os
for name in ("HOME", "HASHSEEK_CACHE", "XDG_CACHE_HOME", "TORCH_HOME"): os.environ.pop(name, None)
os.setuid(123456)  # without an entry in /etc/passwd
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import cache_folder
from hashseek.retrieval.models.torchvision_weights import cached
for path in (cache_folder, lambda: cached("weights.pth")):
    try: path()
    except BadConfig as error: print("HOME" in str(error))
sys.exit()
"""
    process = start(before=code)
    assert process.wait() == 0, process.err
    assert process.out.split() == ["True", "True"]


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_a_file_is_replaced_with_the_permissions_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        for content in (b"first", b"second"):
            write_atomically(tmp_path / "new" / "file", content)
            assert (tmp_path / "new" / "file").read_bytes() == content
    finally:
        os.umask(before)
    assert [(path.name, path.stat().st_mode & 0o777) for path in (tmp_path / "new").iterdir()] == [
        ("file", 0o666 & ~umask)
    ]


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomically(tmp_path / "file", b"content")
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "file"), None)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_csv_keeps_all_digits_and_any_file_name():
    rows = [["name", "value"], ["b\udcffd", 0.1 + 0.2], ["a\rb", 1.0], ['c\r\n, "d"\r\n', 2.0]]
    content = as_csv(rows)
    assert b"b\xffd" in content
    assert content.startswith(b"name,value\n")
    text = io.StringIO(content.decode(errors="surrogateescape"), newline="")
    assert list(csv.reader(text)) == [[str(cell) for cell in row] for row in rows]
