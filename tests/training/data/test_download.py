"""Archives of data sets: downloaded when files are missing, and unpacked without halves."""

import contextlib
import zipfile
from pathlib import Path

import pytest

from hashseek.retrieval.errors import BadDataset
from hashseek.training.data.download import Archive, read_or_download, unpack
from hashseek.training.data.image_table import Incomplete
from support.dataset_files import write_tar
from support.web import serving


def make_zip(file: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(file, "w") as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return file


@pytest.mark.parametrize(("make", "kind"), [(make_zip, ".zip"), (write_tar, ".tar")])
def test_unpacking_completes_a_folder_writes_nothing_outside_and_refuses_damage(tmp_path, make, kind):
    members = {"set/a.jpg": b"a" * 9000, "set/deep/c.txt": b"c"}
    file = make(tmp_path / f"set{kind}", members)
    (tmp_path / "root" / "set").mkdir(parents=True)
    (tmp_path / "root" / "set" / "a.jpg").write_bytes(b"a" * 700)
    unpack(file, tmp_path / "root")
    for name, content in members.items():
        assert (tmp_path / "root" / name).read_bytes() == content
    unsafe = make(tmp_path / f"unsafe{kind}", {"../outside.txt": b"x"})
    with contextlib.suppress(BadDataset):
        unpack(unsafe, tmp_path / "root")
    assert not (tmp_path / "outside.txt").exists()
    file.write_bytes(file.read_bytes()[:7000])
    with pytest.raises(BadDataset, match=str(file)):
        unpack(file, tmp_path / "root")


def test_a_compressed_archive_with_a_wrong_byte_is_refused(tmp_path):
    file = tmp_path / "set.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a.bin", bytes(9000))
    content = bytearray(file.read_bytes())
    content[len("a.bin") + 30] = 0xFF  # the first byte of the compressed data
    file.write_bytes(content)
    with pytest.raises(BadDataset, match=str(file)):
        unpack(file, tmp_path / "root")


def test_a_set_is_downloaded_when_files_are_missing_and_then_left_alone(tmp_path):
    published, root = tmp_path / "published", tmp_path / "root"
    published.mkdir()

    def read(on_error: str) -> str:
        if not (root / "images" / "a.jpg").is_file():
            raise Incomplete("a.jpg is missing")
        return on_error

    with serving(published) as url:
        archives = [Archive(f"{url}/set.zip", None, into="images")]
        with pytest.raises(BadDataset, match=r"a\.jpg.*/set\.zip"):
            read_or_download(read, archives, root, download=False, on_error="skip")
        with pytest.raises(BadDataset, match=r"set\.zip.*404"):
            read_or_download(read, archives, root, download=True, on_error="skip")
        make_zip(published / "set.zip", {"a.jpg": b"a"})
        wrong = Archive(f"{url}/set.zip", "0" * 32, into="images")
        with pytest.raises(BadDataset):
            read_or_download(read, [wrong], root, download=True, on_error="skip")
        assert read_or_download(read, archives, root, download=True, on_error="skip") == "skip"
    assert (root / "set.zip").is_file()
    (root / "images" / "a.jpg").unlink()
    assert read_or_download(read, archives, root, download=True, on_error="skip") == "skip"  # the archive is there
    assert read_or_download(read, archives, root, download=True, on_error="skip") == "stop"  # complete at once
