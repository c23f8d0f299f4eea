"""Configurations: every mistake is named, overrides apply, and what Hashseek ships is sound."""

from pathlib import Path

import pytest

from hashseek.retrieval.errors import BadConfig
from hashseek.training.config import load_config

MINIMAL = '[data]\nname = "shapes"\n[model]\nbackbone = "resnet18"\nn_bits = 48\n'


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(MINIMAL)
    return file


def test_overrides_take_toml_values_and_bare_words(toml):
    config = load_config(toml, ["model.n_bits=12", "loss.beta=1.5", "model.weights=/a/b.pth", "optimizer.clip_norm=1"])
    assert config.model.n_bits == 12
    assert config.loss.options() == {"beta": 1.5}
    assert config.model.weights == "/a/b.pth"
    assert config.optimizer.clip_norm == 1.0


def test_another_name_drops_what_was_meant_for_the_old_one():
    shipped = Path("shapes_shufflenet_v2_hyp2_48")
    assert load_config(shipped, ["loss.name=dsh"]).loss.options() == {}
    assert load_config(shipped, ["loss.alpha=0.1", "loss.name=dsh"]).loss.options() == {"alpha": 0.1}
    assert load_config(shipped, ["loss.name=hyp2"]).loss.options() == {"beta": 0.5}
    assert load_config(shipped, ["data.root=here", "data.name=folder"]).data.options() == {"root": "here"}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.nbits=12", "no setting 'model.nbits': did you mean 'n_bits'"),
        ("optimiser.lr=1", "no setting 'optimiser': did you mean 'optimizer'"),
        ("model.n_bits=0", "'model.n_bits' is 0: input should be greater than or equal to 1"),
        ("model.n_bits=2000", "less than or equal to 1024"),
        ("model.n_bits=many", "'model.n_bits' is 'many'"),
        ("train.epochs=0", "'train.epochs' is 0"),
        ("optimizer.lr=-1", "'optimizer.lr' is -1"),
        ("optimizer.schedule=linear", "'optimizer.schedule' is 'linear'"),
        ("optimizer.warmup_epochs=20", "must be less than train.epochs, 20"),
        ("n_bits=12", "written section.key=value"),
        ("model.n_bits", "written section.key=value"),
        ("model.n_bits.deep=1", "is a value and not a section"),
    ],
)
def test_a_mistake_in_a_setting_is_one_sentence_that_names_it(toml, override, sentence):
    with pytest.raises(BadConfig, match=sentence) as caught:
        load_config(toml, [override])
    assert "\n" not in str(caught.value)


def test_files_that_are_no_configuration(tmp_path, toml):
    with pytest.raises(BadConfig, match=r"no configuration .*nowhere\.toml: give a TOML file or one of .*shapes"):
        load_config(tmp_path / "nowhere.toml")
    toml.write_text("[data\n")
    with pytest.raises(BadConfig, match="not valid TOML"):
        load_config(toml)
    toml.write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match="not valid TOML"):
        load_config(toml)
    toml.write_text('[data]\nname = "shapes"\n')
    with pytest.raises(BadConfig, match="'model' is missing"):
        load_config(toml)
