"""Encoder engines: folding changes nothing, codes do not depend on the batch, and engines agree."""

import copy
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hashseek.retrieval import devices
from hashseek.retrieval.checkpoint import load_checkpoint, save_checkpoint
from hashseek.retrieval.codes import unpack
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.engines import build_engine, check_engine, openvino_models
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import delete_oldest
from hashseek.retrieval.images import Preprocessing, normalizer, preprocess
from hashseek.retrieval.models.backbones import build_backbone, default_preprocessing
from hashseek.retrieval.models.batch_norm_folding import conv_norm_pairs, fold
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.retrieval.models.lazy_backbone import LazyBackbone
from support.models import PREPROCESSING
from support.pictures import N_PICTURES, draw

pytestmark = pytest.mark.xdist_group("engines")  # networks that several tests use are converted once
NAMES = ("torch", "openvino")
CPU = torch.device("cpu")
OUTSIDE = "tests:network"  # the name of a backbone whose converted form is not cached


def network(name: str, *, seed: int = 0) -> nn.Module:
    """A backbone with random weights whose batch norm is as far from the identity as a trained one's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build_backbone(name)[0].eval()
        for norm in module.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean.normal_(0, 0.1)
                norm.running_var.uniform_(0.5, 1.5)
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.normal_(norm.bias, 0, 0.1)
    return module


class Depends(nn.Module):
    """Takes a branch that depends on its input, which cannot be exported."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) if x.sum() > 0 else -x.mean((2, 3))


class Small(nn.Module):
    """One convolution and one linear layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, width, 8, stride=8), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).relu().mean((2, 3)))


def pictures(n: int, preprocessing: Preprocessing) -> np.ndarray:
    return np.stack([preprocess(draw(seed), preprocessing) for seed in range(n)])


def logged(caplog) -> list[str]:
    return [record.levelname for record in caplog.records if record.name == "hashseek"]


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.fixture(scope="module")
def centred(tmp_path_factory) -> Path:
    """A checkpoint whose bits split the pictures about in halves, without an output that is 0 up to rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = HashModel(backbone="squeezenet1_1", n_bits=48).eval()
    with torch.inference_mode():
        pixels = torch.from_numpy(pictures(N_PICTURES, PREPROCESSING))
        model.head.bias -= model(normalizer(PREPROCESSING, CPU)(pixels)).mean(dim=0)
    file = tmp_path_factory.mktemp("centred") / "model.safetensors"
    save_checkpoint(file, model, PREPROCESSING, label_names=())
    return file


@pytest.mark.parametrize(
    ("name", "size", "n_norms"),
    [
        ("mobilenet_v2", 64, 52),
        ("resnet18", 64, 20),
        ("googlenet", 64, 57),
        ("efficientnet_b0", 64, 49),
        ("timm:mobilenetv3_small_050", 64, 34),
    ],
)
def test_folded_batch_norm_changes_nothing_but_rounding(name, size, n_norms):
    if name.startswith("timm:"):
        pytest.importorskip("timm")
    original = network(name)
    before = copy.deepcopy(original.state_dict())
    folded, n_folded = fold(original)
    assert n_folded == n_norms == sum(isinstance(m, nn.BatchNorm2d) for m in original.modules())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
    inputs = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = original(inputs), folded(inputs)
    assert relative(found.numpy(), expected.numpy()) < 1e-4
    assert all(torch.equal(before[key], value) for key, value in original.state_dict().items())


def test_a_convolution_that_is_used_twice_keeps_its_two_batch_norms():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.first, self.second = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.conv(self.first(self.conv(x))))

    module = Twice().eval()
    assert conv_norm_pairs(module) == []

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return y + self.norm(y)  # what is added is not normalised

    assert conv_norm_pairs(Read().eval()) == []


def test_a_network_that_cannot_be_traced_is_left_as_it_is():
    class Depends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x if x.sum() > 0 else -x))

    module = Depends().eval()
    folded, n_folded = fold(module)
    assert n_folded == 0
    x = torch.ones(1, 3, 5, 5)
    assert torch.equal(folded(x), module(x))
    preprocessing = Preprocessing(size=16, mean=(0.5,) * 3, std=(0.5,) * 3)
    engine = build_engine("torch", LazyBackbone.of(module, OUTSIDE), preprocessing, device="cpu", precision="fp32")
    assert engine.name == "torch cpu float32"


def test_float32_features_of_torch_are_those_of_the_network():
    module = network("resnet18")
    pixels = pictures(5, PREPROCESSING)
    engine = build_engine("torch", LazyBackbone.of(module, OUTSIDE), PREPROCESSING, device="cpu", precision="fp32")
    assert engine.name == "torch cpu float32 folded"
    with torch.inference_mode():
        expected = module(normalizer(PREPROCESSING, CPU)(torch.from_numpy(pixels))).numpy()
    assert relative(engine(pixels), expected) < 1e-4


@pytest.mark.parametrize("precision", ["fp32", "auto"])
def test_torch_gives_an_image_one_code_alone_in_any_batch_and_again(precision, centred):
    pixels = pictures(N_PICTURES, PREPROCESSING)
    loaded = load_checkpoint(centred)
    encoder = Encoder(loaded, device="cpu", precision=precision, engine="torch")
    codes = encoder.encode_pixels(pixels)
    assert len(np.unique(codes, axis=0)) > N_PICTURES // 2  # or equal codes would show nothing
    np.testing.assert_array_equal(encoder.encode_pixels(pixels), codes)
    np.testing.assert_array_equal(np.concatenate([encoder.encode_pixels(one[None]) for one in pixels]), codes)
    np.testing.assert_array_equal(encoder.encode_pixels(pixels[::-1].copy())[::-1], codes)
    encoder.batch_size = 5
    np.testing.assert_array_equal(encoder.encode_pixels(pixels), codes)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints of 64 bits as they come from the generator of random numbers, by backbone."""
    folder = tmp_path_factory.mktemp("plain")
    for backbone in ("squeezenet1_1", "timm:mobilenetv3_small_050", "timm:test_vit"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = HashModel(backbone=backbone, n_bits=64).eval()
        preprocessing = default_preprocessing(backbone)
        assert preprocessing is not None
        save_checkpoint(folder / backbone, model, replace(preprocessing, size=96), label_names=())
    return {file.name: file for file in folder.iterdir()}


def test_torch_uses_no_more_threads_than_the_container_grants(plain, monkeypatch):
    monkeypatch.setattr(devices, "n_cores", lambda: 1)
    torch.set_num_threads(2)
    try:
        Encoder(load_checkpoint(plain["squeezenet1_1"]), device="cpu", engine="torch")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backbone", ["squeezenet1_1", "timm:test_vit"])
def test_openvino_computes_every_output_to_the_last_bit_as_in_any_other_batch(backbone, precision, plain):
    """Also with other threads. The weights are plainly random, and 40 images keep every request busy many times."""
    if backbone.startswith("timm:"):
        pytest.importorskip("timm")
    if precision == "bf16" and not devices.fast_bf16():
        pytest.skip("this processor is not fast in bf16")
    loaded = load_checkpoint(plain[backbone])
    pixels = pictures(40, loaded.header.image_preprocessing())
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            encoder = Encoder(loaded, device="cpu", precision=precision, engine="openvino")
        finally:
            torch.set_num_threads(1)
        for batch_size in (1, 3, 32):
            encoder.batch_size = batch_size
            found.append(encoder.features_and_outputs(pixels)[1])
    assert len(np.unique(found[0], axis=0)) == len(pixels)
    for outputs in found[1:]:
        np.testing.assert_array_equal(outputs, found[0])


@pytest.mark.parametrize("backbone", ["squeezenet1_1", "timm:mobilenetv3_small_050", "timm:test_vit"])
def test_engines_and_batches_change_float32_outputs_by_rounding_alone(backbone, plain):
    if backbone.startswith("timm:"):
        pytest.importorskip("timm")
    loaded = load_checkpoint(plain[backbone])
    pixels = pictures(35, loaded.header.image_preprocessing())
    openvino_encoder = Encoder(loaded, device="cpu", precision="fp32", engine="openvino")
    assert openvino_encoder.engine == "openvino cpu float32"
    assert sys.modules.get("openvino_telemetry") is None  # which would send usage data
    expected = openvino_encoder.features_and_outputs(pixels)[1]
    torch_encoder = Encoder(loaded, device="cpu", precision="fp32", engine="torch")
    for batch_size in (1, 3, 32):
        torch_encoder.batch_size = batch_size
        found = torch_encoder.features_and_outputs(pixels)[1]
        assert relative(found, expected) < 1e-4
        differ = (found > 0) != (expected > 0)
        assert (np.abs(expected[differ]) < 1e-4 * np.abs(expected).max()).all()


def test_auto_is_openvino_on_a_cpu_and_torch_for_what_it_cannot_convert(monkeypatch, caplog, checkpoint):
    monkeypatch.delenv("HASHSEEK_ENGINE")
    assert Encoder(load_checkpoint(checkpoint), device="cpu").engine.startswith("openvino cpu ")
    assert not logged(caplog)
    engine = build_engine("auto", LazyBackbone.of(Depends(), OUTSIDE), PREPROCESSING, device="cpu")
    assert engine.name.startswith("torch cpu ")
    assert logged(caplog) == ["WARNING"]
    with pytest.raises(BadConfig):
        build_engine("openvino", LazyBackbone.of(Depends(), OUTSIDE), PREPROCESSING, device="cpu")
    monkeypatch.setenv("HASHSEEK_ENGINE", "torch")
    assert Encoder(load_checkpoint(checkpoint), device="cpu").engine.startswith("torch cpu ")
    monkeypatch.setenv("HASHSEEK_ENGINE", "steam")
    with pytest.raises(BadConfig):
        check_engine("auto")


class Antialiased(nn.Module):
    """Can be exported, but OpenVINO has no such operation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(x, size=(8, 8), mode="bicubic", antialias=True).mean((2, 3))


def test_openvino_silences_no_logger_when_it_fails(caplog, monkeypatch):
    monkeypatch.delenv("HASHSEEK_ENGINE")
    level = logging.root.level
    assert build_engine("auto", LazyBackbone.of(Antialiased(), OUTSIDE), PREPROCESSING, device="cpu").name.startswith(
        "torch cpu "
    )
    assert logging.root.level == level
    assert logged(caplog) == ["WARNING"]


def test_a_network_that_openvino_converts_wrongly_runs_on_torch(monkeypatch):
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3)) + torch.rand(1, 3)

    monkeypatch.delenv("HASHSEEK_ENGINE")
    engine = build_engine("auto", LazyBackbone.of(Noisy(), OUTSIDE), PREPROCESSING, device="cpu")
    assert engine.name.startswith("torch cpu ")


class TestCacheOfConvertedNetworks:
    def test_a_converted_network_is_not_built_again(self, plain):
        """Building it imports torch and torchvision, which takes longer than everything else that a search does."""
        Encoder(load_checkpoint(plain["squeezenet1_1"]), device="cpu", engine="openvino")
        program = f"""
import sys
from pathlib import Path
from hashseek.retrieval.checkpoint import load_checkpoint
from hashseek.retrieval.encoder import Encoder
Encoder(load_checkpoint(Path({str(plain["squeezenet1_1"])!r})), device="cpu", engine="openvino")
print(sorted({{"torch", "torchvision"}} & {{*sys.modules}}))
"""
        run = [sys.executable, "-c", program]
        assert subprocess.run(run, check=True, capture_output=True, text=True).stdout == "[]\n"

    def test_other_weights_preprocessing_or_names_have_files_of_their_own(self, own_cache):
        one, other = Small(), Small()
        keys = ((one, 64, "a"), (other, 64, "a"), (one, 65, "a"), (one, 64, "b"))
        paths = {
            openvino_models._file(LazyBackbone.of(network, name), replace(PREPROCESSING, size=size))
            for network, size, name in keys
        }
        assert len(paths) == 4
        # The code of a network from outside may change.
        build_engine("openvino", LazyBackbone.of(one, "module:Outside"), PREPROCESSING, device="cpu")
        assert not own_cache.exists()

    def test_a_network_that_cannot_be_converted_is_not_tried_again(self, own_cache, caplog, monkeypatch):
        network = LazyBackbone.of(Antialiased(), "antialiased")
        monkeypatch.delenv("HASHSEEK_ENGINE")
        with pytest.raises(BadConfig):
            build_engine("openvino", network, PREPROCESSING, device="cpu")
        with monkeypatch.context() as patch:
            patch.setattr(torch.export, "export", None)
            assert build_engine("auto", network, PREPROCESSING, device="cpu").name.startswith("torch cpu ")
        [message] = [record.getMessage() for record in caplog.records if record.name == "hashseek"]
        [file] = own_cache.glob("openvino/*")
        assert "aten." in message  # the reason
        assert str(file) in message
        file.unlink()
        with pytest.raises(BadConfig):
            build_engine("openvino", network, PREPROCESSING, device="cpu")
        assert file.is_file()

    def test_a_network_is_converted_once_and_again_if_its_file_is_damaged(self, own_cache, caplog, monkeypatch):
        network, pixels = LazyBackbone.of(Small(), "small"), pictures(3, PREPROCESSING)
        expected = build_engine("openvino", network, PREPROCESSING, device="cpu")(pixels)
        [file] = own_cache.glob("openvino/*")
        whole = file.read_bytes()
        changed = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
        for damaged in (changed, b""):
            caplog.clear()
            file.write_bytes(damaged)
            again = build_engine("openvino", network, PREPROCESSING, device="cpu")(pixels)
            np.testing.assert_array_equal(again, expected)
            assert logged(caplog) == ["WARNING"]
        monkeypatch.setattr(torch.export, "export", None)
        again = build_engine("openvino", network, PREPROCESSING, device="cpu")(pixels)
        np.testing.assert_array_equal(again, expected)

    def test_without_a_place_to_write_there_is_no_cache_and_one_log_line(self, small_disk, monkeypatch, caplog):
        (small_disk / "file").touch()
        full = small_disk / "full"
        full.mkdir()
        network, pixels = LazyBackbone.of(Small(width=600), "small"), pictures(3, PREPROCESSING)  # 1.4 MB of weights
        found = []
        for cache in (small_disk / "file", full):
            caplog.clear()
            monkeypatch.setenv("HASHSEEK_CACHE", str(cache))
            found.append(build_engine("openvino", network, PREPROCESSING, device="cpu")(pixels))
            assert logged(caplog) == ["WARNING"]
        np.testing.assert_array_equal(*found)
        assert not [path for path in full.rglob("*") if path.is_file()]

    def test_the_longest_unused_files_make_room(self, tmp_path):
        for number, name in enumerate(["old", "older", "new"]):
            (tmp_path / f"{name}.model").write_bytes(b"x" * 10)
            os.utime(tmp_path / f"{name}.model", (1000 - 10 * number,) * 2)
        os.utime(tmp_path / "new.model", (2000, 2000))  # used again
        delete_oldest(tmp_path, "*.model", keep=25)
        assert {file.name for file in tmp_path.iterdir()} == {"old.model", "new.model"}
        delete_oldest(tmp_path, "*.model", keep=5)
        assert [file.name for file in tmp_path.iterdir()] == ["new.model"]


@pytest.mark.parametrize("name", NAMES)
def test_bf16_flips_few_bits(name, centred):
    if not devices.fast_bf16():
        pytest.skip("this processor is not fast in bf16")
    pixels = pictures(N_PICTURES, PREPROCESSING)
    loaded = load_checkpoint(centred)
    exact = Encoder(loaded, device="cpu", precision="fp32")
    rough = Encoder(loaded, device="cpu", precision="bf16", engine=name)
    assert rough.engine.startswith(f"{name} cpu bfloat16")
    assert (
        rough.features_and_outputs(pixels)[1] != exact.features_and_outputs(pixels)[1]
    ).mean() > 0.9  # it does compute in bf16
    bits = [unpack(encoder.encode_pixels(pixels), 48) for encoder in (exact, rough)]
    assert (bits[0] != bits[1]).mean() < 0.05


@pytest.mark.parametrize("name", NAMES)
def test_an_encoder_leaves_the_checkpoint_as_it_is_and_takes_no_image(name, checkpoint):
    loaded = load_checkpoint(checkpoint)
    before = {key: value.clone() for key, value in loaded.model.state_dict().items()}
    encoder = Encoder(loaded, device="cpu", engine=name)
    assert encoder.features(np.zeros((0, 3, 64, 64), np.uint8)).shape == (0, encoder.n_features)
    assert encoder.encode_pixels(encoder.pixels_of([])).shape == (0, 6)
    pixels = encoder.pixels_of([draw(1), draw(2)])
    for view in (np.asfortranarray(pixels), pixels[:, ::-1].copy()[:, ::-1]):
        assert np.array_equal(encoder.features(view), encoder.features(pixels))
    for key, value in loaded.model.state_dict().items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    ("flags", "precision", "bf16"),
    [
        ({"amx_bf16", "avx512_bf16"}, "auto", True),
        ({"GenuineIntel", "avx512_bf16"}, "auto", False),  # it can, but is slower so
        ({"AuthenticAMD", "avx512_bf16"}, "auto", True),
        ({"AuthenticAMD"}, "auto", False),
        (set(), "auto", False),
        (set(), "bf16", True),
        ({"amx_bf16"}, "fp32", False),
    ],
)
def test_auto_precision_is_the_faster_one(monkeypatch, flags, precision, bf16):
    monkeypatch.setattr(devices, "cpu_features", lambda: frozenset(flags))
    assert devices.in_bf16(precision, cpu=True) is bf16


def test_what_is_not_available_is_refused(monkeypatch, checkpoint):
    loaded = load_checkpoint(checkpoint)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, options in (
        ("tensorrt", {}),
        ("torch", {"precision": "fp16"}),
        ("openvino", {"device": "tpu"}),
        ("openvino", {"device": "cuda"}),
    ):
        with pytest.raises(BadConfig):
            check_engine(name, **options)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BadConfig):
        Encoder(loaded, engine="openvino", device="cpu")


def test_other_threads_encode_while_a_network_is_folded():
    """Tracing replaces `nn.Module.__call__` for the whole process, and a service loads a new model while it answers."""
    other, folded = network("resnet18"), network("resnet18", seed=1)
    pixels = torch.zeros(1, 3, 32, 32)
    done = threading.Event()
    problems: list[BaseException] = []

    def encode() -> None:
        with torch.inference_mode():
            while not done.is_set():
                try:
                    other(pixels)
                except BaseException as error:
                    problems.append(error)
                    return

    thread = threading.Thread(target=encode)
    thread.start()
    try:
        for _ in range(10):
            assert len(conv_norm_pairs(folded)) == 20
    finally:
        done.set()
        thread.join()
    assert problems == []


def test_a_stream_is_encoded_in_order_and_read_at_most_three_batches_ahead(checkpoint):
    encoder, drawn = Encoder(load_checkpoint(checkpoint), device="cpu"), []

    def items():
        for item in range(10 * encoder.batch_size):
            drawn.append(item)
            yield item

    stream = encoder.stream(items(), lambda item: (item, np.array([item])), np.ravel)
    for number, (item, found) in enumerate(stream):
        assert item == found == number
        assert len(drawn) <= number + 3 * encoder.batch_size
    assert number == len(drawn) - 1
