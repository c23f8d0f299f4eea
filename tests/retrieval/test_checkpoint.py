"""Checkpoints: a round trip keeps every code, and nothing damaged, foreign or changed is ever trusted."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hashseek.retrieval.checkpoint import (
    Checkpoint,
    Header,
    fingerprint_of,
    load_checkpoint,
    load_header,
    save_checkpoint,
)
from hashseek.retrieval.encoder import Encoder, VectorEncoder
from hashseek.retrieval.errors import BadCheckpoint
from hashseek.retrieval.files import checksum_of
from hashseek.retrieval.images import Preprocessing, normalizer
from hashseek.retrieval.models.fully_connected import as_arrays
from hashseek.retrieval.models.hash_model import HashModel
from support.in_process import run_command

PREPROCESSING = Preprocessing(size=64, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), crop_fraction=1.0)


@pytest.fixture
def model() -> HashModel:
    torch.manual_seed(0)
    return HashModel(backbone="squeezenet1_1", n_bits=20)


@pytest.fixture
def path(model, tmp_path) -> Path:
    file = tmp_path / "model.safetensors"
    save_checkpoint(file, model, PREPROCESSING, label_names=("a", "b"), training={"x": 1}, scores={"val_mAP@5": 0.5})
    return file


def fingerprint(model: HashModel, preprocessing: Preprocessing | None) -> str:
    header = Header(model.backbone_name, model.n_bits, preprocessing, (), "", head=model.head_name)
    return fingerprint_of(header, as_arrays(model))


def rewrite(path: Path, change, tensors=None) -> None:
    """Write the file again with a changed header."""
    with safe_open(path, framework="pt") as opened:
        content = json.loads(opened.metadata()["hashseek"])
        kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(content)
    save_file(kept if tensors is None else tensors(kept), path, metadata={"hashseek": json.dumps(content)})


def header_of(path: Path) -> dict:
    with safe_open(path, framework="pt") as opened:
        return json.loads(opened.metadata()["hashseek"])


def test_a_round_trip_keeps_everything(model, path):
    loaded = load_checkpoint(path)
    assert loaded.header == load_header(path)
    assert loaded.header.preprocessing == PREPROCESSING
    assert loaded.header.label_names == ("a", "b")
    assert (loaded.header.training, loaded.header.scores) == ({"x": 1}, {"val_mAP@5": 0.5})
    assert loaded.header.fingerprint == fingerprint(model, PREPROCESSING)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 64, 64), dtype=np.uint8)
    with torch.no_grad():
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (PREPROCESSING.mean, PREPROCESSING.std))
        expected = model.eval()((torch.from_numpy(pixels) / 255 - mean) / std).numpy()
    outputs = Encoder(loaded, device="cpu", precision="fp32").features_and_outputs(pixels)[1]
    np.testing.assert_allclose(outputs, expected, atol=1e-4)


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_a_model_that_was_trained_further_encodes_as_it_is_now(path, engine):
    loaded = load_checkpoint(path)
    first, second = (tensor for tensor in loaded.model.parameters() if tensor.ndim == 4), loaded.model.head.weight
    with torch.no_grad():
        next(first).mul_(1.5)
        second.mul_(-1)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 64, 64), dtype=np.uint8)
    with torch.inference_mode():
        expected = loaded.model(normalizer(PREPROCESSING, torch.device("cpu"))(torch.from_numpy(pixels))).numpy()
    for checkpoint in (loaded, Checkpoint.of(loaded.model, loaded.header)):
        outputs = Encoder(checkpoint, device="cpu", precision="fp32", engine=engine).features_and_outputs(pixels)[1]
        np.testing.assert_allclose(outputs, expected, atol=1e-3 * np.abs(expected).max())


def test_a_file_that_changes_later_does_not_change_what_was_loaded(path):
    loaded = load_checkpoint(path)
    expected = load_checkpoint(path).model.state_dict()
    path.write_bytes(bytes(path.stat().st_size))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())


def test_the_fingerprint_depends_on_weights_preprocessing_and_length(model):
    first = fingerprint(model, PREPROCESSING)
    assert first == fingerprint(model, PREPROCESSING)
    other = Preprocessing(size=65, mean=PREPROCESSING.mean, std=PREPROCESSING.std, crop_fraction=1.0)
    assert first != fingerprint(model, other)
    with torch.no_grad():
        model.head.bias[3] += 1e-3
    assert first != fingerprint(model, PREPROCESSING)


def test_checkpoints_of_earlier_versions_keep_their_fingerprints_and_headers(tmp_path):
    model = HashModel(backbone="squeezenet1_1", n_bits=12)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_((torch.arange(parameter.numel()).view(parameter.shape) % 17 + i) / 64)
    # As version 0.1.0 computed it: codes of collections made with it must stay comparable.
    recorded = "0b0a4f3213230a94b701f29142c67f82829b8bbfe1874e67332a17945f88b710"
    assert fingerprint(model, PREPROCESSING) == recorded
    save_checkpoint(tmp_path / "m.safetensors", model, PREPROCESSING, label_names=("a", "b"))
    content = header_of(tmp_path / "m.safetensors")
    assert content["format_version"] == 1
    assert content["model"] == {"backbone": "squeezenet1_1", "n_bits": 12}
    assert load_checkpoint(tmp_path / "m.safetensors").header.head == "linear"


@pytest.mark.parametrize("head", ["linear_bn", "mlp", "mlp:7"])
def test_other_heads_make_the_round_trip_and_older_versions_refuse_them(head, tmp_path):
    torch.manual_seed(0)
    # MNASNet asks `load_state_dict` for a version number that a safetensors file does not have.
    model = HashModel(backbone="mnasnet0_5", n_bits=20, head=head).train()
    with torch.no_grad():
        model(torch.randn(3, 3, 64, 64))  # moves the batch norm's statistics
    file = tmp_path / "m.safetensors"
    save_checkpoint(file, model, PREPROCESSING, label_names=("a", "b"))
    assert header_of(file)["format_version"] == 2
    assert header_of(file)["model"] == {"backbone": "mnasnet0_5", "n_bits": 20, "head": head}
    loaded = load_checkpoint(file)
    assert loaded.header.head == loaded.model.head_name == head
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(loaded.model(images), model.eval()(images))
    plain = HashModel(backbone="mnasnet0_5", n_bits=20)
    plain.load_state_dict(model.state_dict(), strict=False)
    assert fingerprint(plain, PREPROCESSING) != loaded.header.fingerprint


@pytest.fixture
def of_vectors(tmp_path) -> Path:
    """A checkpoint of a model that takes vectors of 294 numbers."""
    torch.manual_seed(0)
    model = HashModel(backbone="mlp:294-16", n_bits=20)
    model.backbone.standardize(torch.arange(294.0), torch.full((294,), 3.0))
    save_checkpoint(tmp_path / "vectors.safetensors", model, None, label_names=("a", "b"))
    return tmp_path / "vectors.safetensors"


def test_a_model_of_vectors_makes_the_round_trip_with_its_statistics(of_vectors):
    loaded = load_checkpoint(of_vectors)
    assert header_of(of_vectors)["preprocessing"] is None
    assert loaded.header.preprocessing is None
    assert torch.equal(loaded.model.backbone.mean, torch.arange(294.0))
    assert fingerprint(loaded.model, None) == loaded.header.fingerprint
    with torch.no_grad():
        loaded.model.backbone.mean[5] += 1
    assert fingerprint(loaded.model, None) != loaded.header.fingerprint


def test_a_model_of_vectors_encodes_no_images(of_vectors, pictures, capsys, tmp_path):
    with pytest.raises(BadCheckpoint, match="294"):
        Encoder(load_checkpoint(of_vectors), device="cpu")
    code, _, err = run_command(capsys, "index", "add", tmp_path / "new", pictures, "--checkpoint", of_vectors)
    assert code == 2
    assert "294" in err


def test_preprocessing_is_for_images_and_images_need_it(model, tmp_path):
    with pytest.raises(ValueError, match="squeezenet1_1"):
        save_checkpoint(tmp_path / "m.safetensors", model, None, label_names=())
    vectors = HashModel(backbone="mlp:3-4", n_bits=4)
    with pytest.raises(ValueError, match="mlp:3-4"):
        save_checkpoint(tmp_path / "m.safetensors", vectors, PREPROCESSING, label_names=())


@pytest.mark.parametrize("keep", [None, 0, 4, 100, 5000])
def test_a_missing_or_truncated_file_is_refused(path, keep):
    if keep is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:keep])
    for load in (load_header, load_checkpoint):
        with pytest.raises(BadCheckpoint):
            load(path)


def test_a_foreign_file_is_refused(tmp_path):
    foreign = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(3)}, foreign)
    with pytest.raises(BadCheckpoint):
        load_checkpoint(foreign)
    save_file({"a": torch.zeros(3, dtype=torch.float8_e4m3fn)}, foreign, {"format": "pt"})  # NumPy lacks the type
    with pytest.raises(BadCheckpoint):
        load_checkpoint(foreign)
    foreign.write_text("a text file that was renamed")
    with pytest.raises(BadCheckpoint):
        load_checkpoint(foreign)


def plus_one(tensors):
    tensors["head.weight"][0, 0] += 1
    return tensors


@pytest.mark.parametrize(
    ("change", "tensors"),
    [
        (lambda content: content.update(format_version=7) or content.update(checksum=checksum_of(content)), None),
        (lambda content: content["scores"].update({"val_mAP@5": 0.99}), None),
        (lambda content: None, plus_one),
        (lambda content: None, lambda tensors: {"head.weight": tensors["head.weight"]}),
    ],
    ids=["newer format", "changed header", "changed weights", "missing weights"],
)
def test_a_changed_checkpoint_is_refused(path, change, tensors):
    rewrite(path, change, tensors)
    with pytest.raises(BadCheckpoint):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda head: {"weight": head["weight"][:5]},
        lambda head: {name: values[:5] for name, values in head.items()},
        lambda head: {"weight": head["weight"]},
        lambda head: {},
    ],
)
def test_a_head_that_does_not_fit_is_refused_although_its_fingerprint_is_right(path, change):
    loaded = load_checkpoint(path)
    head = loaded.part("head.")
    kept = {name: values for name, values in loaded.tensors.items() if not name.startswith("head.")}
    changed = change(head)
    forged = Checkpoint(loaded.header, {**kept, **{f"head.{name}": values for name, values in changed.items()}})
    with pytest.raises(BadCheckpoint):
        _ = forged.head


@pytest.mark.parametrize("change", ["a missing one", "one less", "of another layer", "NaN"])
@pytest.mark.parametrize("name", ["mean", "std", "layers.0.weight", "layers.0.bias"])
def test_a_backbone_of_vectors_that_does_not_fit_is_refused_although_its_fingerprint_is_right(of_vectors, name, change):
    loaded = load_checkpoint(of_vectors)
    VectorEncoder(loaded)
    tensors = {one: values.copy() for one, values in loaded.tensors.items()}
    values = tensors.pop(f"backbone.{name}")
    if change != "a missing one":
        shape = values.shape[1:]
        changed = {"one less": values[1:], "of another layer": np.ones((7, *shape), np.float32), "NaN": values}[change]
        changed.flat[0] = np.nan if change == "NaN" else changed.flat[0]
        tensors[f"backbone.{name}"] = changed
    with pytest.raises(BadCheckpoint, match="mlp:294-16 with 20 bits"):
        VectorEncoder(Checkpoint(loaded.header, tensors))


def test_a_head_for_other_features_is_refused(of_vectors):
    loaded = load_checkpoint(of_vectors)
    weight = loaded.tensors["head.weight"][:, :9]
    with pytest.raises(BadCheckpoint):
        VectorEncoder(Checkpoint(loaded.header, {**loaded.tensors, "head.weight": weight}))
