import inspect
import json
import math
import re
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from hashseek.api.cli import COMMANDS, build, main
from hashseek.retrieval.errors import BadConfig
from hashseek.training.cli.losses import as_markdown, in_full, listing
from hashseek.training.losses import CLASSIFICATION, LOSSES, build_loss, hyperparameters
from hashseek.training.losses.catalogue import ENTRIES, KINDS, Numbers, facts, values_of
from hashseek.training.losses.hashing.quantization import QUANTIZERS
from support.paths import ROOT

DOCS = ROOT / "docs" / "reference" / "losses.md"
EACH_HYPERPARAMETER = [(name, key) for name in LOSSES for key in hyperparameters(name)]

# Values that are accepted only beside another one.
BESIDE = {
    ("supcon", "empty_match", True): {"positives": "all"},
    ("hbl", "reduction", "labels"): {"base": "mulsupcon"},
    ("hbl", "reduction", "sample"): {"base": "mulsupcon"},
}

# Data-dependent sizes: the rows of each label are listed and decomposed.
BREAKS_THE_GRAPH = ("clml",)


def build_with(name, key, value):
    return build_loss(name, n_classes=6, n_bits=16, **{key: value}, **BESIDE.get((name, key, value), {}))


def refuses(name, key, value):
    with pytest.raises(BadConfig) as error:
        build_with(name, key, value)
    assert key in str(error.value)
    return str(error.value)


def test_every_loss_has_an_entry_and_every_entry_is_a_loss():
    assert set(ENTRIES) == set(LOSSES)
    assert {entry.kind for entry in ENTRIES.values()} == set(KINDS)
    assert {name for name, entry in ENTRIES.items() if entry.kind == "classification"} == set(CLASSIFICATION)
    for entry in ENTRIES.values():
        assert all([entry.paper, entry.formula, entry.use])


@pytest.mark.parametrize("name", LOSSES)
def test_every_hyperparameter_has_values_and_nothing_else_has(name):
    fixed = LOSSES[name].keywords if isinstance(LOSSES[name], partial) else {}
    assert all(values_of(name, key) for key in hyperparameters(name))
    assert set(ENTRIES[name].values) <= {*hyperparameters(name), *fixed}
    assert all(hyper.meaning for hyper in facts(name).hyperparameters)


@pytest.mark.parametrize(("name", "key"), EACH_HYPERPARAMETER)
def test_what_is_listed_is_accepted_and_nothing_beyond(name, key):
    values, default = values_of(name, key), hyperparameters(name)[key]
    if isinstance(values, Numbers):
        inside, outside = bounds(values)
    else:
        assert default in values
        inside, outside = list(values), ["", "no such thing", 7, None]
    for value in [default, *inside]:
        build_with(name, key, value)
    for value in outside:
        refuses(name, key, value)


def bounds(values):
    """Values of which all are allowed, and values of which none is."""
    step = 1 if values.whole else 1e-6
    inside, outside = [], [math.nan, math.inf, -math.inf]
    if values.whole:
        outside.append(values.least + 0.5)
    if values.least > -math.inf:
        (outside if values.above else inside).append(values.least)
        inside.append(values.least + step)
        outside += [values.least - step, values.least - 1e6]
    else:
        inside.append(-1e6)
    if values.most < math.inf:
        inside.append(values.most)
        outside += [values.most + step, values.most + 1e6]
    else:
        inside.append(10**6)
    return inside, outside


@pytest.mark.parametrize(
    ("name", "key"),
    [(name, key) for name, key in EACH_HYPERPARAMETER if isinstance(values_of(name, key), Numbers)],
)
def test_words_and_switches_are_no_numbers(name, key):
    for value in ("1", True, *(() if hyperparameters(name)[key] is None else (None,))):
        refuses(name, key, value)


@pytest.mark.parametrize(("name", "key"), EACH_HYPERPARAMETER)
def test_the_refusal_of_a_word_names_the_words_that_are_listed(name, key):
    values = values_of(name, key)
    if isinstance(values, tuple) and isinstance(values[0], str):
        assert refuses(name, key, "no such thing").endswith(f"choose one of {', '.join(values)}")


@pytest.mark.parametrize("name", LOSSES)
def test_facts_are_those_of_the_module(name):
    found, loss = facts(name), build_loss(name, n_classes=4, n_bits=8)
    assert set(found.learned) == set(dict(loss.named_parameters()))
    assert set(found.learned) <= {"proxies", "prototypes"}
    assert set(found.held) == ({"centres"} if hasattr(loss, "centres") else set())
    assert found.logits == ("needed" if name in CLASSIFICATION else "optional" if name == "clml" else "not read")
    assert found.text in inspect.getdoc(type(loss))
    assert "Args:" not in found.text


def test_who_takes_a_queue():
    assert {name for name in LOSSES if facts(name).memory} == {
        *("dhn", "dpsh", "dsh", "hashnet", "idhn"),
        *("hbl", "l_base", "msc", "mulsupcon", "reg", "simdis", "supcon", "supcon_all", "supcon_reg", "wo_reg"),
    }


def test_facts_leave_the_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    facts("hyp2")
    assert torch.equal(torch.rand(3), expected)


# The command


def run(*arguments):
    return CliRunner().invoke(build(["losses"]), ["losses", *arguments], catch_exceptions=False)


def test_the_list_names_every_loss_and_hyperparameter(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = run().output
    assert COMMANDS["losses"][0] == "hashseek.training.cli.losses:losses"
    assert re.findall(r"^  (\w+)", text, re.M) == list(ENTRIES)
    assert max(map(len, text.splitlines())) <= 100
    flat = re.sub(r"\s+", " ", text)
    for name, entry in ENTRIES.items():
        assert f"{entry.paper}: {entry.formula}." in flat
        for key in hyperparameters(name):
            assert f"{key} = " in flat
    for shown in (
        "beta = 0.5 (>= 0)",
        "zeta = none (or in [-1, 1])",
        "k_min = 64 (whole, >= 1)",
        "delta = 0.75 (in (0, 1])",
        "tau = 0.07 (> 0)",
        'parts = "proxy+irrelevant" (or "proxy", "pair", "proxy+pair")',
        "empty_match = false (or true)",
        "Needs: prototypes (learned), queue (optional).",
    ):
        assert shown in flat, shown


@pytest.mark.parametrize("width", [40, 72, 110])
def test_the_list_keeps_to_its_width(width):
    assert all(len(line) <= width for line in listing(width).splitlines())


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_full(name):
    text = in_full(name, 100)
    flat = re.sub(r"\s+", " ", text)
    for part in (ENTRIES[name].paper, ENTRIES[name].formula, ENTRIES[name].use, *facts(name).terms):
        assert part in flat
    for hyper in facts(name).hyperparameters:
        assert f"{hyper.name} = " in text
        assert hyper.meaning in flat
    assert ("nested" in text) == (name not in CLASSIFICATION)
    assert "quantization = {kind, weight}" in flat
    assert run(name).output.startswith(text.splitlines()[0])


def test_a_variant_says_what_it_is_a_variant_of():
    assert in_full("hyp2_pair", 80).startswith('hyp2_pair: HyP2 with parts = "pair", beta = none\n')
    assert in_full("wo_reg", 80).startswith("wo_reg: Reg with penalty = false\n")


def test_an_unknown_name_is_one_sentence_with_a_suggestion(capsys):
    with pytest.raises(SystemExit) as left:
        main(["losses", "hyp"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "hashseek: there is no loss 'hyp': did you mean 'hyp2'?\n"
    with pytest.raises(BadConfig, match="leave 'hyp2' or --markdown out"):
        run("hyp2", "--markdown")


# The document


def test_the_document_holds_the_tables_as_the_command_writes_them():
    start, end = "<!-- hashseek losses --markdown -->\n", "<!-- end -->"
    held = DOCS.read_text(encoding="utf-8").partition(start)[2].partition(end)[0]
    assert held.strip() == as_markdown().strip(), "run `hashseek losses --markdown` and paste it between the marks"
    assert run("--markdown").output == as_markdown()


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_the_tables_hold_every_quantiser(kind):
    assert f"| `{kind}` | " in as_markdown()


def test_options_that_the_document_names_exist():
    options = re.findall(r"`(\w+)((?:, \w+ = [\w.\"+-]+)+)`", DOCS.read_text(encoding="utf-8"))
    assert len(options) > 20
    for name, rest in options:
        given = {key: json.loads(value) for key, value in re.findall(r"(\w+) = ([\w.\"+-]+)", rest)}
        build_loss(name, n_classes=6, n_bits=16, **given)


def test_the_document_points_at_what_exists():
    text = DOCS.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert DOCS.parent.joinpath(target).exists(), target
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M), target


# What the document says about torch.compile; test_build_loss has autocast.


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in BREAKS_THE_GRAPH])
def test_compiles_without_a_graph_break(name):
    generator = torch.Generator().manual_seed(0)
    loss = build_loss(name, n_classes=4, n_bits=8, **({"k_min": 2, "lam": 1.0} if name == "hbl" else {}))
    outputs = torch.randn(9, 8, generator=generator)
    labels = torch.randint(0, 2, (9, 4), generator=generator).float()
    given = {"logits": torch.randn(9, 4, generator=generator), "epoch": 2}
    if facts(name).memory:
        given["memory"] = (outputs.flip(0) + 0.1, labels.flip(0))
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    for term, value in compiled(outputs, labels, **given).items():
        torch.testing.assert_close(value, loss(outputs, labels, **given)[term])
    torch.compiler.reset()
