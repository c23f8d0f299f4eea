"""`hashseek losses`, and docs/reference/losses.md, which it writes."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hashseek.api.cli import build
from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses import LOSSES, build_loss, loss_class
from hashseek.training.losses.catalogue import as_markdown, in_full, listing
from hashseek.training.losses.hashing.quantization import QUANTIZERS
from support.paths import ROOT

DOCS = ROOT / "docs" / "reference" / "losses.md"


def run(*arguments):
    return CliRunner().invoke(build(["losses"]), ["losses", *arguments], catch_exceptions=False).output


def flat(text):
    return re.sub(r"\s+", " ", text)


def test_the_list_names_every_loss_and_hyperparameter():
    text = run()
    assert re.findall(r"^  (\w+)", text, re.M) == list(LOSSES)
    for name in LOSSES:
        loss = loss_class(name)
        assert f"{loss.source}: {loss.formula}." in flat(text)
        assert all(f"{key} = " in flat(text) for key in loss.hyperparameters())
    for shown in (
        "beta = 0.5 (>= 0)",
        "zeta = none (or in [-1, 1])",
        "k_min = 64 (a whole number >= 1)",
        "delta = 0.75 (in (0, 1])",
        'parts = "proxy+irrelevant" (or "proxy", "pair", "proxy+pair")',
        "empty_match = false (or true)",
        "Needs: prototypes (learned), queue (optional).",
    ):
        assert shown in flat(text), shown


@pytest.mark.parametrize("width", [40, 110])
def test_the_list_keeps_to_its_width(width):
    assert all(len(line) <= width for line in listing(width).splitlines())


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_full(name):
    text, loss = flat(in_full(name, 100)), loss_class(name)
    for part in (
        name,
        loss.source,
        loss.formula,
        loss.use,
        flat(loss.__doc__).strip(),
        "quantization = {kind, weight}",
    ):
        assert part in text
    for hyper in loss.hyperparameters().values():
        assert f"{hyper.name} = " in text
        assert flat(hyper.limits.meaning) in text
    assert ("nested" in text) == (loss.kind != "classification")
    assert run(name).startswith(f"{name}\n")


def test_settings_named_in_docstrings_are_accepted():
    named = [
        (name, key, json.loads(value))
        for name in LOSSES
        for key, value in re.findall(r"`(\w+) = ([^`]+)`", loss_class(name).__doc__ or "")
    ]
    assert len(named) >= 4
    for name, key, value in named:
        build_loss(name, n_classes=6, n_bits=16, **{key: value})


def test_a_variant_is_shown_with_the_formula_of_its_loss():
    assert flat(loss_class("hyp2").__doc__).strip() in flat(in_full("hyp2_pair", 80))


def test_a_loss_from_outside_the_package_is_shown(tmp_path, monkeypatch):
    (tmp_path / "shown_losses.py").write_text(
        "from hashseek.training.losses.hashing.dpsh import DPSH\nclass Mine(DPSH):\n    pass\nother = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "eta = 0.1 (>= 0)" in run("shown_losses:Mine")
    with pytest.raises(BadConfig, match="shown_losses:other"):
        run("shown_losses:other")


def test_an_unknown_name_is_refused_with_a_suggestion_before_torch_is_loaded():
    program = "import sys; sys.modules['torch'] = None; from hashseek.api.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "losses", "hyp"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'hyp2'" in done.stderr
    with pytest.raises(BadConfig):
        run("hyp2", "--markdown")


# The document


def test_the_document_holds_the_tables_as_the_command_writes_them():
    start, end = "<!-- hashseek losses --markdown -->\n", "<!-- end -->"
    held = DOCS.read_text(encoding="utf-8").partition(start)[2].partition(end)[0]
    assert held.strip() == as_markdown().strip(), "run `hashseek losses --markdown` and paste it between the marks"
    assert run("--markdown") == as_markdown()
    assert all(f"| `{kind}` | " in as_markdown() for kind in QUANTIZERS)
