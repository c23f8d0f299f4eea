"""A collection of pictures alone: fitted once, nothing is encoded twice, and codes are those of the checkpoint."""

import csv
import os
import re
import shutil
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

import hashseek
from hashseek.indexing import fitting
from hashseek.indexing.collection import Collection, open_or_create
from hashseek.indexing.fit_options import FitOptions, find_network, network_for_refit
from hashseek.indexing.fitting import fit_to_sources, plan_collection
from hashseek.indexing.ingest import loading
from hashseek.indexing.ingest.batch import ingest
from hashseek.indexing.ingest.sources import find_sources
from hashseek.retrieval import images
from hashseek.retrieval.checkpoint import Header, load_checkpoint, load_header
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadCheckpoint, BadCodes, BadCollection, BadConfig, BadDataset, BadImage
from hashseek.retrieval.models.hash_model import HashModel
from support.collections import codes_by_path
from support.dataset_files import write_tar
from support.pictures import draw, png, save

PREPROCESSING = {"size": 64, "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


def options(weights, n_bits=4):
    return FitOptions(n_bits, "squeezenet1_1", str(weights), PREPROCESSING)


def fit(folder, weights, *paths, n_bits=4, **keywords):
    plan = plan_collection(folder, options(weights, n_bits), find_sources(paths))
    return fit_to_sources(find_sources(paths), *plan, device="cpu", precision="fp32", **keywords)


@pytest.mark.parametrize("most", [20_000, 9])
def test_each_picture_is_decoded_once_and_gets_the_code_of_the_checkpoint(
    tmp_path, pictures, weights, monkeypatch, most
):
    folder = shutil.copytree(pictures, tmp_path / "pictures")
    shutil.copy(folder / "picture 04.jpg", folder / "copy.jpg")
    (folder / "broken.png").write_bytes(b"x")
    decoded = Counter()

    def count(data, preprocessing, *, name):
        decoded[Path(name).name] += 1
        return images.load_file(data, preprocessing, name=name)

    monkeypatch.setattr(loading, "load_file", count)
    monkeypatch.setattr(fitting, "MAX_FITTED", most)
    first = fit(tmp_path / "c", weights, folder)
    with first.checkpoint() as checkpoint:
        collection = open_or_create(tmp_path / "c", checkpoint=checkpoint)
    with closing(collection):
        *_, report = ingest(collection, first.encoder, first.reuse(find_sources([folder])))
        assert (report.added, report.known, report.skipped) == (12, 1, 1)
        assert first.encoded == {}  # `--watch` would keep it
        assert collection.verify() == []
        found = codes_by_path(collection)
        assert collection.catalog.spaces.engines() == {first.encoder.engine: 12}
    del decoded["broken.png"]
    assert decoded.pop("copy.jpg", 0) <= 1
    assert set(decoded.values()) == {1}
    header = load_header(tmp_path / "c" / "checkpoint.safetensors")
    assert header.label_names == ()
    record = header.training["fit"]
    assert (record["method"], record["labels"]) == ("weighted_itq", "none")
    assert 0 < record["n_images"] == first.record["n_images"] <= min(12, most)
    assert (record["backbone"], record["weights"], len(record["weights_sha256"])) == (
        "squeezenet1_1",
        "squeezenet.safetensors",
        64,
    )
    encoder = Encoder(load_checkpoint(tmp_path / "c" / "checkpoint.safetensors"), device="cpu", precision="fp32")
    for path, code in found.items():
        pixels = images.load_file(Path(path).read_bytes(), encoder.preprocessing).pixels
        assert encoder.encode_pixels(pixels[None]).tobytes() == code
    assert len(set(found.values())) > 6


def test_a_picture_that_changes_after_the_fit_is_encoded_anew(tmp_path, pictures, weights):
    folder = shutil.copytree(pictures, tmp_path / "pictures")
    first = fit(tmp_path / "c", weights, folder)
    changed = save(folder / "picture 04.jpg", 77)
    with (
        first.checkpoint() as checkpoint,
        closing(open_or_create(tmp_path / "c", checkpoint=checkpoint)) as collection,
    ):
        list(ingest(collection, first.encoder, first.reuse(find_sources([folder]))))
        record = next(record for record in collection.catalog.page(after=0, limit=99) if record.path == str(changed))
        loaded = images.load_file(changed.read_bytes(), first.encoder.preprocessing)
        assert (record.bytes, record.width) == (changed.stat().st_size, loaded.width)
        expected = first.encoder.encode_pixels(loaded.pixels[None])
        assert collection.catalog.code_of(record.id).code.tobytes() == expected.tobytes()


def test_urls_are_fetched_once_and_images_in_a_tar_are_not_read_again(tmp_path, weights):
    files = {f"{seed}.png": png(seed) for seed in range(8)}
    shard = write_tar(tmp_path / "shard.tar", files)
    urls = {f"https://example.org/{seed}.png": png(seed) for seed in range(8, 12)}
    (tmp_path / "list.txt").write_text("\n".join(urls))
    remaining = dict(urls)
    paths = shard, tmp_path / "list.txt"
    first = fit(tmp_path / "c", weights, *paths, fetch=remaining.pop)
    assert not remaining
    with (
        first.checkpoint() as checkpoint,
        closing(open_or_create(tmp_path / "c", checkpoint=checkpoint)) as collection,
    ):
        first.encoder.features_and_outputs = None
        *_, report = ingest(collection, first.encoder, first.reuse(find_sources(paths)), fetch=remaining.pop)
        assert (report.added, report.skipped) == (12, 0)
        assert collection.verify() == []


def test_few_pictures_get_a_random_rotation_and_the_fit_does_not_depend_on_chance(tmp_path, pictures, weights):
    first, again = (fit(tmp_path / "c", weights, pictures, n_bits=32) for _ in range(2))
    assert first.fallback
    assert first.record["method"] == "random"
    codes = np.stack([image.code for *_, image in first.encoded.values()])
    assert len(np.unique(codes, axis=0)) == 12
    assert codes.tobytes() == np.stack([image.code for *_, image in again.encoded.values()]).tobytes()
    assert fit(tmp_path / "c", weights, pictures, n_bits=6).fallback == ""


@pytest.mark.parametrize(
    ("n", "width", "n_bits", "named"),
    [(50, 16, 24, {16, 24}), (20, 64, 20, {20}), (19, 64, 20, {19, 20}), (99, 64, 20, {99, 20}), (21, 64, 20, set())],
)
def test_the_reason_for_a_random_rotation_names_the_numbers_that_matter(n, width, n_bits, named):
    features = np.random.default_rng(0).standard_normal((n, width)).astype(np.float32)
    if n == 99:
        features[2:] = features[1]
    model = HashModel(backbone=f"mlp:{width}", n_bits=n_bits, head="normalized")
    record, fallback = fitting.fit_head(model, features, what="vectors")
    assert {int(number) for number in re.findall(r"\d+", fallback)} == named
    assert record["method"] == ("random" if named else "weighted_itq")


@pytest.mark.parametrize(
    ("fit", "n_images", "helps"),
    [
        ({"method": "random", "n_images": 100, "width": 576}, 128, False),
        ({"method": "random", "n_images": 100, "width": 576}, 129, True),
        ({"method": "random", "n_images": 5, "width": 576}, 25, False),
        ({"method": "random", "n_images": 100, "width": 96}, 9000, False),  # 128 bits of 96 numbers
        ({"method": "random", "n_images": 300, "width": 576}, 9000, False),  # they were too alike
        ({"method": "weighted_itq", "n_images": 200}, 799, False),
        ({"method": "weighted_itq", "n_images": 200}, 800, True),
        ({"method": "weighted_itq", "n_images": fitting.MAX_FITTED}, 10**6, False),
        ({}, 10**6, False),
    ],
)
def test_a_refit_is_recommended_when_it_may_help(fit, n_images, helps):
    header = Header("resnet18", 128, None, (), fingerprint="", training={"fit": fit} if fit else {})
    assert fitting.refit_may_help(header, n_images) is helps


@pytest.mark.parametrize("named", ["default", "none"])
def test_a_refit_with_named_weights_keeps_the_network_of_the_collection(indexed, named):
    with closing(Collection(indexed, read_only=True)) as collection:
        network = network_for_refit(collection, FitOptions(weights=named))
        assert (network.backbone, network.weights) == ("squeezenet1_1", named)
        with pytest.raises(BadConfig):  # its checkpoint was trained
            network_for_refit(collection, FitOptions())


def test_pictures_to_which_nothing_can_be_fitted_are_refused(tmp_path, weights, pictures):
    alike = tmp_path / "alike"
    for name in "abc":
        save(alike / f"{name}.png", 5)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for paths in ([alike], [tmp_path / "empty"]):
        with pytest.raises(BadDataset):
            plan_collection(tmp_path / "c", options(weights), find_sources(paths))
    with pytest.raises(BadCollection):
        plan_collection(tmp_path / "full", options(weights), find_sources([pictures]))
    note = PngInfo()
    note.add_text("note", "other bytes, same picture")
    draw(5).save(alike / "d.png", pnginfo=note)
    with pytest.raises(BadDataset):
        fit(tmp_path / "c", weights, alike)
    for name in ("notes.pdf", "more.pdf"):
        (tmp_path / name).write_bytes(b"not a picture")
    with pytest.raises(BadImage):
        plan_collection(tmp_path / "c", options(weights), find_sources([tmp_path / "notes.pdf", tmp_path / "more.pdf"]))
    (alike / "e.png").write_bytes(b"x")
    with pytest.raises(BadImage):
        fit(tmp_path / "c", weights, alike, on_error="stop")
    for name in "abcd":
        (alike / f"{name}.png").write_bytes(name.encode())
    with pytest.raises(BadDataset, match=f"5 .*{alike / 'a.png'}"):  # says why none can be used
        fit(tmp_path / "c", weights, alike)
    assert not (tmp_path / "c").exists()


def test_weights_whose_features_are_not_finite_are_refused(tmp_path, weights, pictures):
    state = load_file(weights)
    state["features.12.expand1x1.bias"].fill_(np.inf)
    save_file(state, tmp_path / "infinite.safetensors")
    with pytest.raises(BadCheckpoint):
        fit(tmp_path / "c", tmp_path / "infinite.safetensors", pictures)


def test_a_collection_without_an_image_does_not_stay(tmp_path, weights, pictures):
    wrong = {"labels": ["not UTF-8: \udcff"], "on_error": "stop"}  # noticed when images are to be stored
    options = {"backbone": "squeezenet1_1", "preprocessing": PREPROCESSING, "weights": weights, "n_bits": 4}
    with pytest.raises(BadConfig):
        hashseek.create_collection(tmp_path / "c", pictures, **options, **wrong, device="cpu")
    assert not (tmp_path / "c").exists()
    with hashseek.create_collection(tmp_path / "c", pictures, **options, device="cpu") as made:
        assert (len(made), made.report.added) == (12, 12)


@pytest.mark.parametrize(
    ("backbone", "made_with", "agreeing", "others"),
    [
        ("pixels", "default", ["default"], ["none"]),
        ("timm:resnet10t", "none", ["none"], ["default"]),
        (None, "trained", [], ["none"]),
        ("squeezenet1_1", "FILE", ["FILE"], ["none", "another FILE"]),
    ],
)
def test_weights_that_are_named_again_must_be_the_same(
    tmp_path, weights, pictures, own_collection, backbone, made_with, agreeing, others
):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / weights.name  # of the same name
    state = {name: value + 1 for name, value in load_file(weights).items()}
    save_file(state, other)
    files = {"FILE": str(weights), "another FILE": str(other)}
    folder = own_collection if made_with == "trained" else tmp_path / "c"
    if made_with != "trained":
        named = {"backbone": backbone, "weights": files.get(made_with, made_with), "preprocessing": PREPROCESSING}
        hashseek.create_collection(folder, pictures, n_bits=4, device="cpu", engine="torch", **named).close()
    for given in agreeing:
        FitOptions(None, backbone, files.get(given, given)).check_agrees(folder)
    for given in others:
        with pytest.raises(BadConfig):
            FitOptions(None, backbone, files.get(given, given)).check_agrees(folder)


def test_options_that_cannot_be_right_are_refused(tmp_path, weights, checkpoint):
    (tmp_path / "weights.bin").touch()
    for wrong, error in [
        (FitOptions(n_bits=0), BadCodes),
        (FitOptions(backbone="squeezenet"), BadConfig),
        (FitOptions(backbone="my_module:function"), BadCheckpoint),
        (FitOptions(weights=str(tmp_path / "none.pth")), BadCheckpoint),
        (FitOptions(weights=str(tmp_path / "weights.bin")), BadCheckpoint),
        (FitOptions(weights=str(weights)), BadConfig),
        (FitOptions(backbone="resnet18", weights=str(checkpoint)), BadCheckpoint),
        (FitOptions(preprocessing={"std": (0, 1, 1)}), BadConfig),
        (FitOptions(preprocessing={"mena": (0, 1, 1)}), BadConfig),
        (FitOptions(preprocessing={"size": "big"}), BadConfig),
        (FitOptions(preprocessing={"size": 192.5}), BadConfig),
        (FitOptions(preprocessing={"mean": None}), BadConfig),
    ]:
        with pytest.raises(error):
            find_network(wrong)
    with pytest.raises(BadCheckpoint):
        fitting.Fitting(find_network(FitOptions(backbone="resnet18", weights=str(weights))))


def test_weights_that_are_a_checkpoint_bring_backbone_and_preprocessing(tmp_path, checkpoint, pictures, monkeypatch):
    own, added, reuse = load_checkpoint(checkpoint), [], fitting.Fitting.reuse

    def watched(self, sources):
        added.extend(reuse(self, sources))
        return iter(added)

    monkeypatch.setattr(fitting.Fitting, "reuse", watched)
    with pytest.raises(BadConfig):  # before anything is fitted
        hashseek.create_collection(tmp_path / "c", pictures, weights="missing.pth", labels="drawn")
    with hashseek.create_collection(
        tmp_path / "c", pictures, n_bits=5, weights=checkpoint, keep_features=True, device="cpu", labels=["drawn"]
    ) as collection:
        assert (collection.report.added, len(collection)) == (12, 12)
        assert collection.get(1).labels == ("drawn",)
        assert {type(image) for image in added} == {loading.LoadedImage}  # none was read or encoded again
        found = load_checkpoint(collection.searcher.collection.checkpoint)
        [hit] = collection.search(pictures / "picture 04.jpg", k=1)
        assert (hit.distance, hit.image.path) == (0, str(pictures / "picture 04.jpg"))
        assert collection.search(pictures / "picture 04.jpg", k=1, rank="float")[0].image.id == hit.image.id
    assert found.header.preprocessing == own.header.preprocessing
    assert (found.header.backbone, found.header.n_bits, found.header.head) == ("squeezenet1_1", 5, "normalized")
    for name, value in own.model.backbone.state_dict().items():
        assert torch.equal(found.model.backbone.state_dict()[name], value)
    with pytest.raises(BadCollection):
        hashseek.create_collection(tmp_path / "c", pictures, weights=checkpoint)


@pytest.mark.skipif("HASHSEEK_DATA" not in os.environ, reason="HASHSEEK_DATA is not set")
def test_photographs_that_look_alike_come_first(tmp_path):
    """Photographs of COCO share a label with their neighbours more often than with others."""
    data = Path(os.environ["HASHSEEK_DATA"]) / "coco256"
    weights = data.parent / "backbones" / "squeezenet1_1_features.safetensors"
    with hashseek.create_collection(
        tmp_path / "c", data / "images", backbone="squeezenet1_1", weights=weights, device="cpu"
    ) as collection:
        opened = collection.searcher.collection
        records = opened.catalog.page(after=0, limit=1000)
        found = [[hit.image.id for hit in collection.similar(record.id, k=6)][1:] for record in records]
    with (data / "labels.csv").open() as lines:
        labels = {Path(row["file"]).name: set(row["labels"].split(";")) for row in csv.DictReader(lines)}
    of = {record.id: labels[Path(record.path).name] for record in records}
    share = np.mean(
        [bool(of[record.id] & of[hit]) for record, hits in zip(records, found, strict=True) for hit in hits]
    )
    chance = np.mean([bool(a & b) for i, a in enumerate(of.values()) for j, b in enumerate(of.values()) if i != j])
    assert share > chance + 0.15
