"""Training images: every cache gives the same batches, and a file that changes during the run is named."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from hashseek.retrieval.errors import BadConfig, BadDataset
from hashseek.retrieval.files import cache_folder
from hashseek.retrieval.images import Preprocessing, load_file
from hashseek.training.config import TrainSection
from hashseek.training.data import broken_images, image_cache
from hashseek.training.data.broken_images import without_broken
from hashseek.training.data.file_digests import digest_files
from hashseek.training.data.splits import Split, Splits
from hashseek.training.data.training_images import Images
from support.commands import wait_until
from support.pictures import N_PICTURES, draw

PREPROCESSING = Preprocessing(size=48, mean=(0.5,) * 3, std=(0.25,) * 3)
EVERY = np.arange(N_PICTURES)


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def split(tmp_path) -> Split:
    """Pictures that a test may damage."""
    for seed in range(N_PICTURES):
        draw(seed).save(tmp_path / f"{seed:02}.jpg", quality=90)
    return split_of(tmp_path)


def split_of(folder: Path) -> Split:
    paths = tuple(sorted(folder.glob("*.jpg")))
    return Split(paths, np.ones((len(paths), 2), np.uint8), tuple(f"line {i + 2}" for i in range(len(paths))))


def collect(images, epoch=0, **options):
    options = {"batch_size": 5, "augmentation": TrainSection(), **options}
    return [(pixels.clone(), rows) for pixels, rows in images.batches(EVERY, seed=(1, epoch), **options)]


def same(first, second):
    return all(torch.equal(a, b) and np.array_equal(r, s) for (a, r), (b, s) in zip(first, second, strict=True))


def test_every_cache_gives_the_same_batches(split):
    kept = {cache: Images(split, PREPROCESSING, cache=cache) for cache in ("memory", "memmap", "none")}
    assert [images.cache for images in kept.values()] == list(kept)
    for augmentation in (None, TrainSection(), TrainSection(rand_augment=2, jitter=0.4)):
        for epoch in (0, 1):
            found = [collect(images, epoch, augmentation=augmentation) for images in kept.values()]
            assert [len(rows) for _, rows in found[0]] == [5, 5, 2]
            assert found[0][0][0].shape == (5, 3, 48, 48)
            assert found[0][0][0].dtype == torch.uint8
            assert same(found[0], found[1])
            assert same(found[0], found[2])
    plain = torch.cat([pixels for pixels, _ in collect(kept["memory"], augmentation=None)])
    for row, path in enumerate(split.paths):
        assert np.array_equal(plain[row], load_file(path.read_bytes(), PREPROCESSING).pixels)
        assert np.array_equal(kept["memmap"].pixels(row), plain[row])


def test_a_seed_decides_each_image_in_any_order(split):
    images = Images(split, PREPROCESSING)
    (forward,), (backward,) = (
        images.batches(rows, batch_size=20, augmentation=TrainSection(), seed=(1, 0)) for rows in (EVERY, EVERY[::-1])
    )
    assert torch.equal(forward[0], backward[0].flip(0))
    ((other, _),) = images.batches(EVERY, batch_size=20, augmentation=TrainSection(), seed=(1, 1))
    assert not torch.equal(forward[0], other)


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_views_follow_each_other_and_the_first_is_what_one_view_gives(split, cache):
    images = Images(split, PREPROCESSING, cache=cache)
    one, two = collect(images), collect(images, augmentation=TrainSection(views=2))
    for (single, rows), (double, chosen) in zip(one, two, strict=True):
        assert np.array_equal(rows, chosen)
        assert double.is_contiguous(memory_format=torch.channels_last)
        first, second = double.split(len(rows))
        assert torch.equal(first, single)
        assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert same(two, collect(images, augmentation=TrainSection(views=2)))


def test_pictures_resized_in_another_way_are_not_taken_from_the_cache(split):
    for one in (PREPROCESSING, replace(PREPROCESSING, interpolation="bicubic")):
        expected = [load_file(path.read_bytes(), one).pixels for path in split.paths]
        images = Images(split, one, cache="memmap")
        assert np.array_equal(np.stack([images.pixels(row) for row in range(len(images))]), expected)


@pytest.mark.parametrize("cache", ["memory", "memmap"])
def test_epochs_after_the_first_never_decode(split, cache):
    images = Images(split, PREPROCESSING, cache=cache)
    first = collect(images, epoch=0)
    for path in split.paths:
        path.unlink()
    assert same(first, collect(images, epoch=0))
    assert not same(first, collect(images, epoch=3))


def test_files_without_a_broken_one_are_not_decoded_again_until_one_changes(split, monkeypatch):
    stop = Splits(split, split, split, ("a", "b"), "")
    skip = replace(stop, on_error="skip")
    with monkeypatch.context() as unwritable:
        unwritable.setenv("HASHSEEK_CACHE", "/proc/nowhere")
        assert without_broken(stop, source="a set") == stop
    assert without_broken(stop, source="a set") == stop
    content, times = split.paths[3].read_bytes(), split.paths[3].stat()
    split.paths[3].write_bytes(b"x" * len(content))
    os.utime(split.paths[3], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert without_broken(stop, source="a set") == stop  # by size and time, not decoded
    with monkeypatch.context() as newer:
        newer.setattr(broken_images, "version", lambda name: version(name) + "1" * (name == "pillow"))
        with pytest.raises(BadDataset):
            without_broken(stop, source="a set")
    os.utime(split.paths[3])
    found = without_broken(skip, ("train", "database"), source="a set")
    assert (len(found.train), len(found.query), len(found.database)) == (N_PICTURES - 1, N_PICTURES, N_PICTURES - 1)
    assert [problem.where for problem in found.problems] == ["line 5"]  # once, though it is in two splits
    with pytest.raises(BadDataset):  # what was found broken is looked at again
        without_broken(stop, source="a set")
    split.paths[3].unlink()
    with pytest.raises(BadDataset):
        without_broken(stop, source="a set")
    assert len(without_broken(skip, source="a set").train) == N_PICTURES - 1
    for path in split.paths:
        path.write_bytes(b"x")
    with pytest.raises(BadDataset):  # nothing is left
        without_broken(skip, source="a set")


def test_an_image_that_is_cut_off_during_the_run_is_named(split):
    images = Images(split, PREPROCESSING, cache="none")
    for epoch in (0, 1):
        collect(images, epoch)
    split.paths[7].write_bytes(split.paths[7].read_bytes()[:800])
    with pytest.raises(BadDataset, match=r"line 9: .*07\.jpg"):
        collect(images, epoch=2)
    split.paths[4].unlink()
    with pytest.raises(BadDataset, match=r"line 6: .*04\.jpg"):
        collect(images, epoch=2)


def test_automatic_takes_memory_then_the_disk_then_neither(split, monkeypatch, caplog):
    needed = N_PICTURES * 48 * 48 * 3 / 2**30
    assert Images(split, PREPROCESSING, cache_gib=needed).cache == "memory"
    assert Images(split, PREPROCESSING, cache_gib=needed * 0.99).cache == "memmap"
    monkeypatch.setattr(image_cache, "RESERVE", 2**60)
    assert Images(split, PREPROCESSING, cache_gib=0).cache == "none"
    assert "the decoded images need" in caplog.text
    with pytest.raises(BadConfig, match="1073741824 GiB"):
        Images(split, PREPROCESSING, cache="memmap")


def test_more_than_the_memory_of_the_machine_is_refused():
    many = Split((Path("a.jpg"),) * 1_000_000, np.ones((1_000_000, 1), np.uint8), ("line 2",) * 1_000_000)
    with pytest.raises(BadConfig, match="GiB"):
        Images(many, Preprocessing(size=2048, mean=(0.5,) * 3, std=(0.5,) * 3), cache="memory")


def files() -> list[Path]:
    return sorted(path for path in (cache_folder() / "images").iterdir() if path.suffix != ".lock")


def test_arrays_that_were_not_used_for_long_are_deleted(split, monkeypatch):
    def of_size(size: int) -> Images:
        return Images(split, Preprocessing(size=size, mean=(0.5,) * 3, std=(0.25,) * 3), cache="memmap")

    for images in (oldest := of_size(32), of_size(33)):
        images.pixels(0)
    for file in files():  # times of files are only accurate to some milliseconds
        os.utime(file, (1, 1))
    of_size(32).pixels(0)  # used again
    (least,) = [file for file in files() if file.stat().st_size > 33 * 33 * 3 * len(split)]
    monkeypatch.setattr(image_cache, "KEPT_BYTES", 2 * least.stat().st_size + 4000)
    of_size(34).pixels(0)
    assert least not in files()
    assert len(files()) == 2
    assert oldest.pixels(1).shape == (3, 32, 32)


def test_the_array_on_disk_is_reused_for_the_same_files_and_size_only(split):
    first = collect(Images(split, PREPROCESSING, cache="memmap"))
    (file,) = files()
    written = file.stat().st_ino
    assert same(first, collect(Images(split, PREPROCESSING, cache="memmap")))
    assert [f.stat().st_ino for f in files()] == [written]
    others = [
        Images(split.take(EVERY[::-1]), PREPROCESSING, cache="memmap"),
        Images(split, Preprocessing(size=32, mean=(0.5,) * 3, std=(0.25,) * 3), cache="memmap"),
        Images(split, Preprocessing(size=48, mean=(0.5,) * 3, std=(0.25,) * 3, crop_fraction=1.0), cache="memmap"),
    ]
    for count, images in enumerate(others, start=2):
        images.pixels(0)
        assert len(files()) == count
    # Mean and deviation are applied later.
    Images(split, Preprocessing(size=48, mean=(0.1,) * 3, std=(0.2,) * 3), cache="memmap").pixels(0)
    assert len(files()) == 4
    draw(99).save(split.paths[0], quality=90)
    changed = Images(split, PREPROCESSING, cache="memmap")
    assert np.array_equal(changed.pixels(0), load_file(split.paths[0].read_bytes(), PREPROCESSING).pixels)


def test_members_of_a_tar_are_told_apart(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"0" * 2000)
    one, two = (Path(f"{tmp_path}/a.tar::{offset}+100/x.jpg") for offset in (512, 1024))
    assert digest_files([one]) != digest_files([two])
    before = digest_files([one])
    os.utime(tmp_path / "a.tar", ns=(1, 1))
    assert digest_files([one]) != before
    with pytest.raises(BadDataset, match="b.tar"):
        digest_files([Path(f"{tmp_path}/b.tar::0+10/x.jpg")])


def test_an_interrupted_array_is_never_used(split):
    split.paths[9].write_bytes(b"broken since it was checked")
    images = Images(split, PREPROCESSING, cache="memmap")
    with pytest.raises(BadDataset, match="line 11"):
        images.pixels(0)
    assert files() == []
    draw(9).save(split.paths[9], quality=90)
    images = Images(split, PREPROCESSING, cache="memmap")
    images._file.with_suffix(".part").write_bytes(b"left by a process that was killed")
    assert np.array_equal(images.pixels(9), load_file(split.paths[9].read_bytes(), PREPROCESSING).pixels)
    assert [file.suffix for file in files()] == [".npy"]


def test_a_second_writer_waits_for_the_first(split, monkeypatch):
    first, second = (Images(split, PREPROCESSING, cache="memmap") for _ in range(2))
    decode, go_on = first._decode, threading.Event()
    asked: list[int] = []
    monkeypatch.setattr(first, "_decode", lambda row: (row == 8 and go_on.wait(60), decode(row))[1])
    monkeypatch.setattr(second, "_decode", lambda row: (asked.append(row), decode(row))[1])
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(first.pixels, 3)
        wait_until(lambda: list(cache_folder().glob("images/*.part")))
        waiting = pool.submit(second.pixels, 3)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        go_on.set()
        assert np.array_equal(writing.result(), waiting.result())
    assert asked == []
    assert len(files()) == 1


def test_a_full_disk_is_reported(split, small_disk, monkeypatch):
    monkeypatch.setenv("HASHSEEK_CACHE", str(small_disk / "cache"))
    large = Preprocessing(size=224, mean=(0.5,) * 3, std=(0.25,) * 3)  # 1.8 MB on a disk of one
    assert Images(split, large, cache="auto", cache_gib=0).cache == "none"
    monkeypatch.setattr(image_cache, "RESERVE", -(2**30))  # as if another program filled it in the meantime
    with pytest.raises(BadConfig, match=os.strerror(errno.ENOSPC)):
        Images(split, large, cache="memmap").pixels(0)
    assert files() == []


@pytest.mark.parametrize("place", ["file", "/proc/nowhere"])
def test_a_cache_folder_that_cannot_be_created_is_refused(split, tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("no folder")
    place = tmp_path / place
    monkeypatch.setenv("HASHSEEK_CACHE", str(place))
    with pytest.raises(BadConfig, match=str(place)):
        Images(split, PREPROCESSING, cache="memmap")
