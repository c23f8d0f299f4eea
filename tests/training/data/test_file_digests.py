"""Files with equal content are found, and only those that may have equal content are read."""

from pathlib import Path

import pytest

from hashseek.training.data import file_digests
from hashseek.training.data.file_digests import equal_files

SAME = bytes(9000)
CONTENTS = {"a": SAME + b"1", "b": SAME + b"1", "c": SAME + b"2", "d": b"three", "e": b"three", "f": b"four"}
CONTENTS |= {"empty": b"", "empty too": b""}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read."""
    names: list[str] = []

    def noting(path: Path) -> bytes:
        names.append(path.name)
        return path.read_bytes()

    monkeypatch.setattr(file_digests, "read_bytes", noting)
    return names


def test_equal_files_are_found_among_those_of_equal_size(tmp_path, read):
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    paths = [tmp_path / name for name in (*CONTENTS, "missing")]
    assert equal_files(paths) == [[tmp_path / "a", tmp_path / "b"], [tmp_path / "d", tmp_path / "e"]]
    assert sorted(read) == list("abcde")
    read.clear()
    assert equal_files(paths, to={tmp_path / "e"}) == [[tmp_path / "d", tmp_path / "e"]]
    assert sorted(read) == list("de")
    assert equal_files(paths, to={tmp_path / "c"}) == []
