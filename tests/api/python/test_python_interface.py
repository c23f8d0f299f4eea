"""`import hashseek`: quick to import, and every example of docs/python-api.md runs."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import ExifTags, Image

import hashseek
from hashseek.retrieval.errors import BadCollection, BadConfig, BadImage, UnknownImage
from hashseek.training.data.datasets import SOURCES
from support.paths import ROOT
from support.pictures import draw

PAGE = ROOT / "docs" / "python-api.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def working_folder(tmp_path, monkeypatch, checkpoint, weights, own_cache):
    """A current folder with what the page talks about."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(checkpoint.read_bytes())
    (tmp_path / "squeezenet1_1.safetensors").write_bytes(weights.read_bytes())
    (tmp_path / "photos").mkdir()
    draw(1).save("query.jpg")
    for seed, name in enumerate(("one", "two", "three"), start=1):
        draw(seed).save(f"photos/{name}.jpg")
    (tmp_path / "my-pictures").mkdir()
    lines = ["file,labels,split"]
    for seed in range(60):
        draw(seed).save(f"my-pictures/{seed}.png")
        lines.append(f"{seed}.png,{'odd' if seed % 2 else 'even'},{('query', 'database', 'train', 'train')[seed % 4]}")
    (tmp_path / "my-pictures" / "labels.csv").write_text("\n".join(lines))
    return tmp_path


def test_every_example_of_the_page_runs(working_folder, serve, capsys):
    variables, service = {}, None
    for example in EXAMPLES:
        if "Client(" in example:
            service = service or serve(working_folder / "my-collection")[1]
            example = example.replace("http://127.0.0.1:8000", str(service.base_url))
        assert len(example.strip().splitlines()) <= 12
        exec(compile(example, str(PAGE), "exec"), variables)
    assert variables["report"].main.n == 10
    assert variables["answer"].hits[0].key == "shop/4711"
    assert variables["codes"].shape == (2, 6)
    for name in ("report", "result", "checkpoint", "collection"):  # as a notebook shows them
        assert len(repr(variables[name])) < 3000
    assert (variables["again"][0].distance, len(variables["hits"])) == (0, 3)
    assert {name for name in hashseek.__all__ if name[0].islower()} <= set(re.findall(r"\w+", PAGE.read_text()))


def test_a_collection_takes_images_of_every_kind(working_folder):
    with pytest.raises(BadCollection):
        hashseek.open_collection("c")
    with pytest.raises(BadConfig):
        hashseek.open_collection("c", checkpoint="model.safetensors", device="cuda:99")
    assert not (working_folder / "c" / "checkpoint.safetensors").exists(), "it would be bound to this checkpoint"
    keeping = {"checkpoint": "model.safetensors", "keep_features": True}
    with hashseek.open_collection("c", **keeping, device="cpu") as collection:
        (working_folder / "broken.jpg").write_bytes(b"no image")
        report = collection.add("photos", "broken.jpg")
        assert (report.added, report.skipped, len(report.problems), len(collection)) == (3, 1, 1, 3)
        with pytest.raises(BadImage):
            collection.add("broken.jpg", on_error="stop")
        file = working_folder / "photos" / "two.jpg"
        with Image.open(file) as opened:
            hits = [collection.search(image, rank="float")[0] for image in (file, str(file), file.read_bytes(), opened)]
        assert {(hit.image.path, hit.distance) for hit in hits} == {(str(file), 0)}
        with pytest.raises(BadConfig):
            collection.add("photos", labels="holiday")
        numbered = np.int64(hits[0].image.id)
        assert collection.similar(numbered)[0].distance == 0
        collection.remove(numbered)
        with pytest.raises(UnknownImage):
            collection.get(hits[0].image.id)
        for sources in (["photos"], 3):
            with pytest.raises(BadConfig):
                collection.add(sources)
    with hashseek.open_collection("c", read_only=True) as collection:
        for change in (lambda: collection.add("photos/two.jpg"), lambda: collection.remove(1)):
            with pytest.raises(BadCollection):
                change()
        assert len(collection) == 2
    assert hashseek.encode([], "model.safetensors").shape == (0, 6)
    with pytest.raises(BadConfig):
        hashseek.encode("photos/two.jpg", "model.safetensors")
    with pytest.raises(BadImage):
        hashseek.encode([np.zeros((8, 8, 3), np.uint8)], "model.safetensors")


def test_the_values_of_n_are_numbers_or_all(working_folder, capsys):
    def evaluate(ns):
        return hashseek.evaluate("model.safetensors", data="my-pictures", ns=ns, device="cpu")

    assert [score.n for score in evaluate(np.array([10, 5])).scores] == [5, 10]
    assert [score.n for score in evaluate([10, "all"]).scores] == [10, 15]
    for wrong in ([], [0], [2.5], ["many"]):
        with pytest.raises(BadConfig):
            evaluate(wrong)


def test_a_report_has_the_reference_of_its_data_set(working_folder, monkeypatch):
    monkeypatch.setitem(SOURCES, "folder", "Us, Our Pictures, Home 2026")
    found = hashseek.evaluate("model.safetensors", data="my-pictures", ns=[5], out="new/report", device="cpu")
    assert found.title.endswith(" on my-pictures")
    assert found.sources["folder"] == SOURCES["folder"]
    assert "Our Pictures" in (working_folder / "new" / "report" / "report.bib").read_text()


def test_an_opened_image_is_encoded_as_its_file_is(tmp_path, checkpoint):
    turned, grey, clear = (tmp_path / name for name in ("turned.jpg", "grey.png", "clear.png"))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    draw(1).save(turned, exif=exif)
    rows = np.random.default_rng(0).integers(0, 2**16, (64, 64), dtype=np.uint16)
    Image.fromarray(rows).save(grey)
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 4), dtype=np.uint8)).save(clear)
    for file in (turned, grey, clear):
        with Image.open(file) as opened:
            assert np.array_equal(hashseek.encode([file], checkpoint), hashseek.encode([opened], checkpoint)), file


def test_importing_loads_little_and_nothing_heavy():
    """11 modules beside those of Python's start, in 50 ms of processor time."""
    program = (
        "import sys; before = len(sys.modules); import hashseek; n_modules = len(sys.modules) - before\n"
        "heavy = [name for name in ('torch', 'numpy', 'faiss', 'fastapi', 'typer', 'hashseek.training') "
        "if name in sys.modules]\n"
        "print(n_modules, dir(hashseek).count('train'), *heavy)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    n_modules, listed, *heavy = done.stdout.split()
    assert (listed, heavy) == ("1", [])
    assert int(n_modules) < 25
    with pytest.raises(AttributeError):
        hashseek.no_such_name  # noqa: B018
