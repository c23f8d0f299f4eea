"""Backbones: each gives the features it promises, and takes exactly the weights that fit."""

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision import models
from torchvision.models import regnet

from hashseek.retrieval.checkpoint import load_checkpoint, save_checkpoint
from hashseek.retrieval.errors import BadCheckpoint, BadConfig
from hashseek.retrieval.images import Preprocessing
from hashseek.retrieval.models.backbones import Removed, build_backbone, default_preprocessing
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.retrieval.models.weight_loading import left_out_prefixes, load_backbone_weights, weight_sets
from hashseek.training.loop.fit import fit
from support.models import run_config
from support.pictures import draw

EIGHT_BY_EIGHT = torch.arange(3 * 8 * 8.0).reshape(1, 3, 8, 8)
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
BICUBIC = {"interpolation": "bicubic"}

# A small network of every family of torchvision with the width of its features, as its paper or torchvision gives it.
FAMILIES = {
    "alexnet": 4096,
    "convnext_tiny": 768,
    "densenet121": 1024,
    "efficientnet_b0": 1280,
    "googlenet": 1024,
    "inception_v3": 2048,
    "maxvit_t": 512,
    "mnasnet0_5": 1280,
    "mobilenet_v2": 1280,
    "mobilenet_v3_small": 1024,
    "regnet_y_400mf": 440,
    "resnet18": 512,
    "resnet50": 2048,
    "shufflenet_v2_x0_5": 1024,
    "squeezenet1_1": 512,
    "swin_t": 768,
    "swin_v2_t": 768,
    "vgg11_bn": 4096,
    "vit_b_32": 768,
}


@pytest.fixture
def without_values(monkeypatch):
    """Build networks as shapes only. RegNet computes its widths with tensors, which need values."""
    widths = regnet.BlockParams.from_init_params

    def with_values(*arguments, **options):
        with torch.device("cpu"):
            return widths(*arguments, **options)

    monkeypatch.setattr(regnet.BlockParams, "from_init_params", with_values)
    with torch.device("meta"):
        yield


def test_every_classification_network_of_torchvision_is_a_backbone():
    names = models.list_models(module=models)
    assert len(names) >= 80
    for name in names:
        assert default_preprocessing(name).size >= 224, name
        assert weight_sets(name), name


@pytest.mark.parametrize("name", FAMILIES)
def test_features_have_their_width_and_states_their_names(name, without_values):
    backbone, width = build_backbone(name)
    assert width == FAMILIES[name]
    assert sum(isinstance(module, Removed) for module in backbone.modules()) == 1
    size = default_preprocessing(name).size
    assert backbone.eval()(torch.zeros(2, 3, size, size)).flatten(1).shape == (2, width)
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    theirs = {key: value.shape for key, value in models.get_model(name, weights=None, **options).state_dict().items()}
    ours = {key: value.shape for key, value in backbone.state_dict().items()}
    assert ours.items() <= theirs.items()
    left_out = [key for key in theirs if key not in ours]
    assert left_out
    assert all(key.startswith(left_out_prefixes(backbone, name)) for key in left_out)


def test_dropout_before_the_classifier_goes_with_it_and_no_other_does():
    backbone, _ = build_backbone("mobilenet_v2")
    assert not any(isinstance(module, nn.Dropout) for module in backbone.modules())
    with torch.device("meta"):
        alexnet, vgg = build_backbone("alexnet")[0], build_backbone("vgg11")[0]
    assert [isinstance(module, nn.Dropout) for module in alexnet.classifier] == [True, False, False, True] + [False] * 3
    assert [isinstance(module, nn.Dropout) for module in vgg.classifier] == [False, False, True] + [False] * 4


def test_training_uses_the_main_output_of_networks_with_auxiliary_heads():
    """HyP2's "GoogLeNet" is Inception v3 at 448 px in the published code and GoogLeNet at 224 px in the paper."""
    for name, size, width in (("inception_v3", 448, 2048), ("googlenet", 224, 1024)):
        with torch.device("meta"):
            backbone, _ = build_backbone(name)
            features = backbone.train()(torch.zeros(2, 3, size, size))
        assert isinstance(features, torch.Tensor)
        assert features.shape == (2, width)


@pytest.mark.parametrize(
    ("name", "weights", "expected"),
    [
        ("resnet50", "default", Preprocessing(size=224, crop_fraction=224 / 232, **IMAGENET)),
        ("resnet50", "IMAGENET1K_V1", Preprocessing(size=224, crop_fraction=0.875, **IMAGENET)),
        ("mobilenet_v2", "some/file.pth", Preprocessing(size=224, crop_fraction=224 / 232, **IMAGENET)),
        ("googlenet", "none", Preprocessing(size=224, crop_fraction=0.875, **HALF)),
        ("inception_v3", "default", Preprocessing(size=299, crop_fraction=299 / 342, **HALF)),
        ("efficientnet_v2_l", "default", Preprocessing(size=480, crop_fraction=1.0, **BICUBIC, **HALF)),
        ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1", Preprocessing(size=384, crop_fraction=1.0, **BICUBIC, **IMAGENET)),
        ("swin_v2_t", "default", Preprocessing(size=256, crop_fraction=256 / 260, **BICUBIC, **IMAGENET)),
    ],
)
def test_the_input_is_that_of_the_weights(name, weights, expected):
    assert default_preprocessing(name, weights=weights) == expected


def test_weights_of_a_vision_transformer_for_another_size_are_refused_before_the_download():
    with pytest.raises(BadCheckpoint, match="384 px"):
        load_backbone_weights(nn.Identity(), name="vit_b_16", weights="IMAGENET1K_SWAG_E2E_V1")


@pytest.mark.parametrize("name", ["squeezenet1_1", "timm:convnext_atto"])  # timm renames weights of the latter
def test_the_backbone_of_a_checkpoint_loads_without_its_hash_layer(name, tmp_path):
    if name.startswith("timm:"):
        pytest.importorskip("timm")
    torch.manual_seed(1)
    trained = HashModel(backbone=name, n_bits=16)
    preprocessing = Preprocessing(size=64, **IMAGENET)
    save_checkpoint(tmp_path / "best.safetensors", trained, preprocessing, label_names=("a",))
    backbone, _ = build_backbone(name)
    load_backbone_weights(backbone, name=name, weights=str(tmp_path / "best.safetensors"))
    assert all(torch.equal(value, trained.backbone.state_dict()[key]) for key, value in backbone.state_dict().items())
    other, _ = build_backbone("shufflenet_v2_x0_5")
    with pytest.raises(BadCheckpoint, match=r"conv1.*--backbone"):
        load_backbone_weights(other, name="shufflenet_v2_x0_5", weights=str(tmp_path / "best.safetensors"))


@pytest.mark.parametrize("name", ["googlenet", "squeezenet1_1", "mnasnet0_5"])
def test_state_dicts_of_torchvision_load_with_any_number_of_classes(name, tmp_path):
    torch.manual_seed(1)
    options = {"init_weights": False} if name == "googlenet" else {}
    network = getattr(models, name)(weights=None, num_classes=7, **options)
    torch.save({"state_dict": {f"module.{k}": v for k, v in network.state_dict().items()}}, tmp_path / "w.pth")
    backbone, _ = build_backbone(name)
    load_backbone_weights(backbone, name=name, weights=str(tmp_path / "w.pth"))
    theirs = network.state_dict()
    ours = backbone.state_dict()
    assert ours
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key])


@pytest.mark.parametrize(
    ("name", "renamed", "device"),
    [
        ("resnet18", {}, "cpu"),
        ("densenet121", {r"(denselayer\d+\.(?:norm|conv))([12])\.": r"\1.\2."}, "cpu"),
        ("vit_b_32", {r"\.mlp\.0\.": ".mlp.linear_1.", r"\.mlp\.3\.": ".mlp.linear_2."}, "meta"),
    ],
)
def test_published_files_load_though_they_are_older_than_the_networks(name, renamed, device, tmp_path):
    """They lack counters of batches, and some layers have names that torchvision changed later."""
    torch.manual_seed(1)
    with torch.device(device):
        theirs = getattr(models, name)(weights=None).state_dict()
        backbone, _ = build_backbone(name)
    published = {}
    for key, value in theirs.items():
        for new, old in renamed.items():
            key = re.sub(new, old, key)
        if not key.endswith("num_batches_tracked"):
            published[key] = value
    assert not published.keys() >= backbone.state_dict().keys()
    torch.save(published, tmp_path / "w.pth")
    load_backbone_weights(backbone, name=name, weights=str(tmp_path / "w.pth"))
    if device == "cpu":
        assert all(torch.equal(value, theirs[key]) for key, value in backbone.state_dict().items())


def test_a_file_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "run",)

    torch.save({"a": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(BadCheckpoint, match=r"evil\.pth"):
        load_backbone_weights(nn.Identity(), name="resnet18", weights=str(tmp_path / "evil.pth"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["none.pth", "cut.safetensors", "cut.pth", "notes.txt", "list.pth"])
def test_unusable_weights_files(tmp_path, name):
    file = tmp_path / name
    if name == "list.pth":
        torch.save([torch.zeros(100)], file)
    elif name != "none.pth":
        save_file({"a": torch.zeros(100)}, file)
        file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(BadCheckpoint, match=name):
        load_backbone_weights(nn.Identity(), name="resnet18", weights=str(file))


@pytest.mark.parametrize("weights", ["default", "IMAGENET1K_V1"])
def test_published_weights_cannot_be_downloaded_offline(monkeypatch, tmp_path, weights):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no server listens there
    with pytest.raises(BadCheckpoint, match="resnet18-f37072fd.pth"):
        load_backbone_weights(nn.Identity(), name="resnet18", weights=weights)


@pytest.mark.parametrize("name", ["resnet19", ""])
def test_an_unknown_backbone(name):
    for ask in (build_backbone, default_preprocessing):
        with pytest.raises(BadConfig, match=f"'{name}'"):
            ask(name)


def test_a_backbone_from_outside_is_trained_saved_and_loaded_by_its_module(monkeypatch, tmp_path, own_cache):
    (tmp_path / "my_backbones.py").write_text(
        "from torch import nn\n"
        "def small():\n"
        "    return nn.Sequential(nn.Conv2d(3, 5, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 5\n"
        "def wrong():\n"
        "    return nn.Identity()\n"
    )
    monkeypatch.chdir(tmp_path)
    for index in range(12):
        draw(index).save(tmp_path / f"{index}.jpg")
    rows = [f"{n}.jpg,{'ab'[n % 2]},{('train', 'query', 'database')[n // 4]}" for n in range(12)]
    (tmp_path / "labels.csv").write_text("\n".join(["file,labels,split", *rows]))
    changes = {"model__backbone": "my_backbones:small", "train__epochs": 1, "train__val_fraction": 0.5}
    run = fit(
        run_config(tmp_path, model__freeze_backbone=True, model__head_init="random", **changes), out=tmp_path / "run"
    ).run
    assert not (own_cache / "features").exists()  # its code may change
    loaded = load_checkpoint(run.best)
    assert loaded.model.n_features == 5
    assert loaded.header.image_preprocessing().mean == IMAGENET["mean"]
    monkeypatch.delitem(sys.modules, "my_backbones")
    monkeypatch.setattr("hashseek.retrieval.plugins.built", set())  # as in another process
    with pytest.raises(BadCheckpoint, match="HASHSEEK_PLUGINS=my_backbones"):
        load_checkpoint(run.best)
    monkeypatch.setenv("HASHSEEK_PLUGINS", "others")
    with pytest.raises(BadCheckpoint, match="HASHSEEK_PLUGINS=others,my_backbones"):
        load_checkpoint(run.best)
    assert "my_backbones" not in sys.modules
    monkeypatch.setenv("HASHSEEK_PLUGINS", "others, my_backbones")
    assert load_checkpoint(run.best).model.n_features == 5
    for name in ("my_backbones:wrong", "my_backbones:none", "no_such_module:small"):
        with pytest.raises(BadConfig, match=name):
            build_backbone(name)
    with pytest.raises(BadCheckpoint):
        load_backbone_weights(loaded.model.backbone, name="my_backbones:small", weights="default")


def test_frozen_batch_norm_stays_in_evaluation_mode_and_the_rest_trains():
    model = HashModel(backbone="resnet18", n_bits=8, head="linear_bn", freeze_batch_norm=True).train()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    assert not any(m.training for m in norms)
    assert model.training
    assert model.backbone.training
    assert model.head[1].training  # nothing was folded into the head's
    before = norms[0].running_mean.clone()
    model(torch.randn(4, 3, 64, 64))
    assert torch.equal(norms[0].running_mean, before)
    assert all(m.training for m in HashModel(backbone="resnet18", n_bits=8).train().modules())


def test_a_size_that_the_network_cannot_take_is_refused():
    for name, size in (("alexnet", 48), ("vit_b_32", 128)):
        with torch.device("meta"):
            model = HashModel(backbone=name, n_bits=4).train()
        with pytest.raises(BadConfig, match=f"{size} .*224"):
            model.check_input_size(size)
        assert model.training
    HashModel(backbone="squeezenet1_1", n_bits=4).check_input_size(48)
    with pytest.raises(BadConfig, match="mlp:4-4"):
        HashModel(backbone="mlp:4-4", n_bits=4).check_input_size(48)
    own = HashModel(backbone="squeezenet1_1", n_bits=4)
    own.backbone.forward = lambda images: (images,)  # as networks of other libraries do
    with pytest.raises(BadConfig, match="squeezenet1_1"):
        own.check_input_size(48)


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "shapes"),
    [
        ("linear", {"head.weight": (6, 8), "head.bias": (6,)}),
        ("mlp", {"head.0.weight": (8, 8), "head.0.bias": (8,), "head.2.weight": (6, 8), "head.2.bias": (6,)}),
        ("mlp:5", {"head.0.weight": (5, 8), "head.0.bias": (5,), "head.2.weight": (6, 5), "head.2.bias": (6,)}),
    ],
)
def test_heads_have_these_parameters(head, shapes):
    model = HashModel(backbone="mlp:4-8", n_bits=6, head=head)
    found = {key: tuple(value.shape) for key, value in model.state_dict().items() if key.startswith("head.")}
    assert found == shapes
    assert model.head_name == head
    assert model(torch.randn(3, 4)).shape == (3, 6)


def test_the_mlp_head_by_hand():
    model = HashModel(backbone="mlp:2-2", n_bits=1, head="mlp:2")
    with torch.no_grad():
        for layer, weight, bias in (
            (model.head[0], [[1.0, 0.0], [0.0, -1.0]], [0.0, 1.0]),
            (model.head[2], [[2.0, 3.0]], [-1.0]),
        ):
            layer.weight.copy_(torch.tensor(weight))
            layer.bias.copy_(torch.tensor(bias))
    # hidden (5, 1 - 0.5) and (0, 1 - 4 -> 0)
    assert model.outputs(torch.tensor([[5.0, 0.5], [-2.0, 4.0]])).flatten().tolist() == [10.5, -1.0]


def test_batch_norm_centres_every_bit_and_takes_a_batch_of_one_by_its_running_statistics():
    torch.manual_seed(0)
    model = HashModel(backbone="mlp:4-8", n_bits=6, head="linear_bn").train()
    outputs = model(torch.randn(50, 4) + 3)
    torch.testing.assert_close(outputs.mean(dim=0), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.std(dim=0, unbiased=False), torch.ones(6), atol=1e-3, rtol=0)
    one = torch.randn(1, 4)
    statistics = model.head[1].running_mean.clone()
    alone = model(one)
    assert torch.equal(model.head[1].running_mean, statistics)
    torch.testing.assert_close(alone, model.eval()(one))
    alone.sum().backward()
    assert model.head[0].weight.grad is not None


@pytest.mark.parametrize("head", ["linear", "linear_bn", "mlp"])
def test_the_head_always_computes_in_float32(head):
    torch.manual_seed(0)
    model = HashModel(backbone="mlp:4-8", n_bits=6, head=head).eval()
    vectors = torch.randn(5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features, outputs = model.features(vectors), model(vectors)
    assert features.dtype == torch.bfloat16
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, model.head(features.float()), atol=0, rtol=0)


@pytest.mark.parametrize("head", ["", "Linear", "mlp:", "mlp:0", "mlp:x", "conv"])
def test_an_unknown_head(head):
    with pytest.raises(BadConfig, match=f"no head '{head}'"):
        HashModel(backbone="mlp:4-8", n_bits=6, head=head)


# --- vectors ----------------------------------------------------------------------------------------------------------


def test_a_backbone_of_vectors_standardises_them_and_is_not_one_of_images():
    model = HashModel(backbone="mlp:3-4-2", n_bits=5)
    assert default_preprocessing("mlp:3-4-2") is None
    assert model.n_features == 2
    layers = model.backbone.layers
    assert [type(layer).__name__ for layer in layers] == ["Linear", "ReLU", "Linear", "ReLU"]
    vectors = torch.tensor([[1.0, 10.0, 7.0], [3.0, 30.0, 7.0]])
    model.backbone.standardize(vectors.mean(dim=0), vectors.std(dim=0, unbiased=False))
    expected = layers(torch.tensor([[-1.0, -1.0, 0.0], [1.0, 1.0, 0.0]]))  # the last never changes
    torch.testing.assert_close(model.features(vectors), expected)
    assert {"backbone.mean", "backbone.std"} <= model.state_dict().keys()
    assert not any(name.endswith(("mean", "std")) for name, _ in model.named_parameters())
    for shape in ((2, 4), (2, 3, 8, 8), (3,)):
        with pytest.raises(BadConfig, match="3"):
            model(torch.zeros(shape))


# --- timm -------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_a_timm_network_is_refused_without_timm(monkeypatch, tmp_path):
    pytest.importorskip("timm")
    model = HashModel(backbone="timm:test_vit", n_bits=8)
    save_checkpoint(tmp_path / "vit", model, default_preprocessing("timm:test_vit"), label_names=())
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(BadConfig):
        load_checkpoint(tmp_path / "vit")


def test_without_timm_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # imports of it fail
    for ask in (build_backbone, default_preprocessing):
        with pytest.raises(BadConfig, match=r"hashseek\[timm\]"):
            ask("timm:resnet10t")


@pytest.mark.parametrize(
    ("name", "width", "expected"),
    [
        ("timm:resnet10t", 512, Preprocessing(size=176, crop_fraction=0.875, **BICUBIC, **IMAGENET)),
        ("timm:convnext_atto", 320, Preprocessing(size=224, crop_fraction=0.875, **BICUBIC, **IMAGENET)),
        (
            "timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k",
            192,
            Preprocessing(size=224, crop_fraction=0.9, **BICUBIC, **HALF),
        ),
        # A network whose features are wider than what timm calls its number of features.
        ("timm:mobilenetv3_small_050", 1024, Preprocessing(size=224, crop_fraction=0.875, **BICUBIC, **IMAGENET)),
        (
            "timm:vit_base_patch32_clip_224.openai",
            768,
            Preprocessing(
                size=224,
                crop_fraction=0.9,
                mean=(0.48145466, 0.4578275, 0.40821073),
                std=(0.26862954, 0.26130258, 0.27577711),
                interpolation="bicubic",
            ),
        ),
        ("timm:vit_small_patch14_dinov2", 384, Preprocessing(size=518, crop_fraction=1.0, **BICUBIC, **IMAGENET)),
    ],
)
def test_networks_of_timm(name, width, expected):
    pytest.importorskip("timm")
    assert default_preprocessing(name) == expected
    with torch.device("meta"):
        backbone, found = build_backbone(name)
        features = backbone.eval()(torch.zeros(2, 3, expected.size, expected.size))
    assert found == width
    assert features.shape == (2, width)


def test_a_vision_transformer_of_timm_takes_other_sizes_and_a_network_without_pooling_is_refused():
    pytest.importorskip("timm")
    model = HashModel(backbone="timm:vit_tiny_patch16_224", n_bits=4)
    model.check_input_size(64)
    with pytest.raises(BadConfig, match="66 .*224"):
        model.check_input_size(66)


def test_timms_own_state_dict_loads_without_its_classifier(tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(1)
    network = timm.create_model("vit_tiny_patch16_224", num_classes=7, depth=1)
    theirs = timm.create_model("resnet10t", num_classes=7).state_dict()
    save_file({key: value.contiguous() for key, value in theirs.items()}, tmp_path / "w.safetensors")
    backbone, _ = build_backbone("timm:resnet10t")
    load_backbone_weights(backbone, name="timm:resnet10t", weights=str(tmp_path / "w.safetensors"))
    assert all(torch.equal(value, theirs[key]) for key, value in backbone.state_dict().items())
    # timm itself would load what fits and leave the rest at random.
    torch.save(network.state_dict(), tmp_path / "shallow.pth")
    backbone, _ = build_backbone("timm:vit_tiny_patch16_224")
    with pytest.raises(BadCheckpoint, match=r"blocks\.1\."):
        load_backbone_weights(backbone, name="timm:vit_tiny_patch16_224", weights=str(tmp_path / "shallow.pth"))
    with pytest.raises(BadCheckpoint, match="timm:vit_tiny_patch16_224"):
        load_backbone_weights(backbone, name="timm:vit_tiny_patch16_224", weights=str(tmp_path / "w.safetensors"))


def test_timms_weights_are_refused_offline_at_once(monkeypatch, caplog):
    pytest.importorskip("timm")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    backbone, _ = build_backbone("timm:resnet10t")
    with pytest.raises(BadCheckpoint, match="timm:resnet10t"):
        load_backbone_weights(backbone, name="timm:resnet10t", weights="default")
    assert not caplog.records  # huggingface_hub warns of each attempt


def test_weights_as_their_authors_published_them_get_timms_names(tmp_path):
    """ConvNeXt's authors use other names than timm."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(2)
    theirs = timm.create_model("convnext_atto", num_classes=7).state_dict()
    published = {}
    for key, value in theirs.items():
        for pattern, name in (
            (r"^stem\.(\d)\.", r"downsample_layers.0.\1."),
            (r"^stages\.(\d)\.downsample\.", r"downsample_layers.\1."),
            (r"^head\.norm\.", "norm."),
            (r"^head\.fc\.", "head."),
            (r"\.blocks\.", "."),
            (r"conv_dw", "dwconv"),
            (r"mlp\.fc", "pwconv"),
        ):
            key = re.sub(pattern, name, key)
        published[key] = value[:, :, 0, 0] if "pwconv" in key and value.dim() == 4 else value
    torch.save({"model": published}, tmp_path / "w.pth")
    backbone, _ = build_backbone("timm:convnext_atto")
    load_backbone_weights(backbone, name="timm:convnext_atto", weights=str(tmp_path / "w.pth"))
    assert all(torch.equal(value, theirs[key]) for key, value in backbone.state_dict().items())


@pytest.mark.parametrize("name", ["timm:resnet19t", "timm:", "timm:resnet10t.best", "timm:hf-hub:someone/thing"])
def test_an_unknown_network_of_timm(name):
    pytest.importorskip("timm")
    with pytest.raises(BadConfig, match="timm"):
        build_backbone(name)


def test_pixels_are_the_means_of_8_by_8_fields():
    picture = EIGHT_BY_EIGHT.repeat_interleave(8, 2).repeat_interleave(8, 3)
    model = HashModel(backbone="pixels", n_bits=4, head="normalized").eval()
    assert torch.equal(model.features(picture), EIGHT_BY_EIGHT.flatten(1))
    load_backbone_weights(model.backbone, name="pixels", weights="default")  # nothing to download
