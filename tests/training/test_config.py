"""Configurations: every mistake is named, overrides apply, and what Hashseek ships is sound."""

from pathlib import Path

import pytest
from PIL import Image

from hashseek.retrieval.errors import BadConfig
from hashseek.training.config import load_config, with_values
from hashseek.training.data.datasets import build_splits
from hashseek.training.losses import build_loss

MINIMAL = '[data]\nname = "shapes"\nroot = "Höhle"\n[model]\nbackbone = "resnet18"\nn_bits = 48\n'


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "shapes_shufflenet_v2_hyp2_48.toml"  # as one that is shipped
    file.write_text(MINIMAL, encoding="utf-8")
    return file


def test_overrides_take_toml_values_and_bare_words(toml):
    config = load_config(toml, ["model.n_bits=12", "loss.beta=1.5", "model.weights=/a/b.pth", "optimizer.clip_norm=1"])
    assert config.model.n_bits == 12
    assert config.data.options() == {"root": "Höhle"}
    assert config.loss.options() == {"beta": 1.5}
    assert config.model.weights == "/a/b.pth"
    assert config.optimizer.clip_norm == 1.0


def test_another_name_drops_what_was_meant_for_the_old_one():
    shipped = Path("shapes_shufflenet_v2_hyp2_48")
    assert load_config(shipped, ["loss.name=dsh"]).loss.options() == {}
    for named in ("loss.name=dsh", 'loss.name = "dsh"', "loss.name = dsh"):
        assert load_config(shipped, ["loss.alpha=0.1", named]).loss.options() == {"alpha": 0.1}
    assert load_config(shipped, ["loss.name=hyp2"]).loss.options() == {"beta": 0.5}
    assert load_config(shipped, ["data.root=here", "data.name=folder"]).data.options() == {"root": "here"}
    own = {"loss": {"weight": 3.0}, "partner": {"name": "asl", "gamma_neg": 3}}
    assert with_values(own, [("loss.name", "tie_aware")])["loss"] == {"name": "tie_aware", "weight": 3.0}
    assert with_values(own, [("loss.name", "hyp2")])["loss"] == {"name": "hyp2"}
    assert with_values(own, [("partner.name", "bce")])["partner"] == {"name": "bce"}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.nbits=12", "'model.nbits': did you mean 'n_bits'"),
        ("optimiser.lr=1", "'optimiser': did you mean 'optimizer'"),
        ("train.compile=true", "there is no setting 'train.compile'"),
        ("model.n_bits=0", "'model.n_bits' is 0"),
        ("model.n_bits=2000", "1024"),
        ("model.n_bits=many", "'model.n_bits' is 'many'"),
        ("model.mean=0.5,0.5,0.5", "'model.mean' is '0.5,0.5,0.5'"),
        ("model.std=[1,1]", r"'model.std' is \[1, 1\]"),
        ("optimizer.schedule=linear", "'optimizer.schedule' is 'linear'"),
        ("optimizer.warmup_epochs=20", "train.epochs, 20"),
        ("n_bits=12", "'n_bits=12'"),
        ("model.n_bits", "'model.n_bits'"),
        ("model.n_bits.deep=1", "'n_bits' is a value"),
    ],
)
def test_a_mistake_in_a_setting_is_one_line_that_names_it(toml, override, named):
    with pytest.raises(BadConfig, match=named) as caught:
        load_config(toml, [override])
    assert "\n" not in str(caught.value)


def test_none_unsets_what_a_file_has_set():
    shipped = Path("mirflickr25k_mobilenet_v2_hyp2_48_finetuned")
    assert load_config(shipped).optimizer.backbone_lr == 1e-4
    unset = load_config(shipped, ["optimizer.backbone_lr=none", "model.size=none", "model.mean=none"])
    assert (unset.optimizer.backbone_lr, unset.model.size, unset.model.mean) == (None, None, None)
    with pytest.raises(BadConfig):
        load_config(shipped, ["optimizer.lr=none"])
    assert load_config(shipped, ["data.held_out=none"]).data.held_out is None
    assert build_loss("dsh", n_classes=3, n_bits=8, m="none").m == 16
    with pytest.raises(BadConfig):
        build_loss("dsh", n_classes=3, n_bits=8, dense="none")


def test_none_unsets_an_option_of_a_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "abcdef":
        Path(name).mkdir()
        for number in range(4):
            Image.new("RGB", (8, 8)).save(f"{name}/{number}.png")
    files = set(tmp_path.iterdir())
    splits = build_splits("folder", root=str(tmp_path), labels="none")
    assert len(splits.label_names) == 6
    assert set(tmp_path.iterdir()) == files


def test_overrides_apply_to_a_dictionary_too_and_leave_it_as_it_was():
    given = {"data": {"name": "shapes"}, "model": {"backbone": "resnet18", "n_bits": 12}}
    config = load_config(given, ["train.seed=7", "model.n_bits=24"])
    assert (config.train.seed, config.model.n_bits, given["model"]["n_bits"]) == (7, 24, 12)
    for overrides in (["nonsense.key=3"], "train.seed=7", {"train.seed": 7}):
        with pytest.raises(BadConfig):
            load_config(given, overrides)


OF_PIXELS = [
    "train.rand_augment=2",
    "train.rand_augment_magnitude=3",
    "train.jitter=0.1",
    "train.min_crop=1",
    "train.flip=false",
]


@pytest.mark.parametrize("override", [*OF_PIXELS, "train.views=2", "optimizer.backbone_lr=1"])
def test_settings_without_effect_on_cached_features_are_refused(toml, override):
    load_config(toml, [override])
    with pytest.raises(BadConfig):
        load_config(toml, [override, "model.freeze_backbone=true"])


@pytest.mark.parametrize("override", OF_PIXELS)
def test_settings_without_effect_on_vectors_are_refused(toml, override):
    load_config(toml, ["model.backbone=mlp:9-16", "train.views=2", "train.noise=0.1"])
    with pytest.raises(BadConfig):
        load_config(toml, [override, "model.backbone=mlp:9-16"])


@pytest.mark.parametrize("content", [b"[data\n", b"\xff\xfe", b'[data]\nname = "shapes"\n', None])
def test_a_file_that_is_no_configuration_is_refused(toml, content):
    if content is None:
        toml.unlink()
    else:
        toml.write_bytes(content)
    with pytest.raises(BadConfig):
        load_config(toml)


def test_one_number_normalises_all_three_channels(toml):
    model = load_config(toml, ["model.mean=0", "model.std=[0.1, 0.2, 0.3]"]).model
    assert (model.mean, model.std) == ((0, 0, 0), (0.1, 0.2, 0.3))
