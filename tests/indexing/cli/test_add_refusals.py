"""`hashseek index add`: what is refused, the dry run with the sentence of the real one."""

import signal
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from hashseek.indexing.collection import Collection
from support.collections import new_images
from support.commands import wait_until
from support.pictures import draw


@pytest.fixture
def folder(tmp_path):
    """A good picture and a bad one."""
    made = tmp_path / "pictures"
    made.mkdir()
    draw(1).save(made / "a.png")
    (made / "bad.png").write_bytes(b"x")
    return made


def test_a_dry_run_stops_at_a_bad_image_as_the_run_does(hashseek, own_collection, folder):
    command = ("index", "add", own_collection, folder, "--on-error", "stop")
    said = hashseek(*command, "--dry-run")
    assert said == hashseek(*command, "--device", "cpu")
    assert said[:2] == (2, "")
    assert "bad.png: is not an image" in said[2]


def test_a_dry_run_refuses_a_place_for_a_new_collection_as_the_run_does(hashseek, tmp_path, folder, checkpoint):
    for place in (folder, folder / "a.png"):
        command = ("index", "add", place, folder, "--checkpoint", checkpoint)
        said = hashseek(*command, "--dry-run")
        assert said == hashseek(*command, "--device", "cpu")
        assert said[:2] == (2, "")
        assert said[2].endswith("choose a new or an empty folder\n")
    torn = tmp_path / "torn"  # a creation was interrupted here
    torn.mkdir()
    for name in ("checkpoint.safetensors", ".checkpoint.safetensors.x", "catalog.sqlite.new"):
        (torn / name).write_bytes(b"")
    command = ("index", "add", torn, folder, "--checkpoint", checkpoint)
    code, out, _ = hashseek(*command, "--dry-run")
    assert (code, out.split(";")[0]) == (0, "dry run: would be added 1, already stored 0, skipped 1")
    assert hashseek(*command, "--device", "cpu")[0] == 0


def test_a_file_of_problems_in_a_folder_that_is_not_there_is_refused_by_name(hashseek, own_collection, folder):
    code, out, err = hashseek("index", "add", own_collection, folder, "--errors", folder / "none" / "x.jsonl")
    assert (code, out) == (2, "")
    assert err == f"hashseek: there is no folder {folder}/none for --errors x.jsonl: create it, or name another\n"


def test_a_file_of_problems_on_a_full_disk_ends_the_run_in_a_sentence(hashseek, own_collection, folder):
    [image] = new_images(np.zeros((1, 6), np.uint8))
    with closing(Collection(own_collection)) as collection:
        collection.add_with_file(replace(image, key="k"), b"data", suffix=".png")
        kept = collection.file_of(collection.catalog.by_key("k"))
    (folder / "list.csv").write_text("file,key\na.png,k\nbad.png,\n")  # replaces a file that the collection keeps
    command = ("index", "add", own_collection, folder / "list.csv", "--device", "cpu", "--errors", "/dev/full")
    code, out, err = hashseek(*command)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "hashseek: No space left on device"
    assert "Traceback" not in err
    assert "ignored" not in err
    assert not kept.exists()


def test_watching_reads_no_list_though_it_is_to_stop_at_errors(start, tmp_path, folder, checkpoint):
    (folder / "bad.png").unlink()
    (folder / "labels.csv").write_text("file,labels\nnothing.png,cat\n")
    command = ("index", "add", tmp_path / "new", folder, "--checkpoint", checkpoint, "--device", "cpu")
    process = start(*command, "--watch", "--every", "0.1", "--on-error", "stop")
    wait_until(lambda: "added 1" in process.out or process.ended)
    process.send(signal.SIGTERM)
    assert process.wait() == 143, process.err
