"""Reports side by side: the figures are those of the evaluations, and other protocols are refused with the reason."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hashseek.api.cli import main
from hashseek.retrieval.checkpoint import load_header, save_checkpoint
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.metrics import bootstrap
from hashseek.retrieval.models.hash_model import HashModel
from hashseek.training.data.splits import Split, Splits
from hashseek.training.evaluation.evaluate import Evaluation, evaluate
from hashseek.training.evaluation.report import load_report
from hashseek.training.evaluation.report.compare import as_markdown, differences, load_entries

NAMES = ("a", "b", "c")


def split(seed: int, n: int) -> Split:
    vectors = np.random.default_rng(seed).standard_normal((n, 6)).astype(np.float32)
    paths = tuple(Path(f"set.npz#{seed}-{i}") for i in range(n))
    return Split(paths, (vectors[:, :3] > 0.3).astype(np.uint8), tuple(f"row {i}" for i in range(n)), vectors)


SPLITS = Splits(split(0, 20), split(1, 15), split(2, 50), NAMES, "f" * 64)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[int, Path]:
    """Untrained models of 8 and 12 bits, of vectors: a whole evaluation of one takes a tenth of a second."""
    folder, made = tmp_path_factory.mktemp("compare"), {}
    for n_bits in (8, 12):
        torch.manual_seed(n_bits)
        model = HashModel(backbone="mlp:6-16", n_bits=n_bits)
        made[n_bits] = folder / f"{n_bits}.safetensors"
        save_checkpoint(made[n_bits], model, None, label_names=NAMES)
    return made


def evaluated(checkpoint: Path, splits: Splits = SPLITS, **options) -> Evaluation:
    return evaluate(checkpoint, splits, **{"data_name": "v", "ns": (5, 20), "n_points": 0, **options})


@pytest.fixture(scope="module")
def evaluations(checkpoints) -> dict[int, Evaluation]:
    return {n_bits: evaluated(path) for n_bits, path in checkpoints.items()}


@pytest.fixture(scope="module")
def written(evaluations, tmp_path_factory) -> dict[int, Path]:
    """Their folders as `hashseek evaluate` writes them. Not to be written to."""
    root = tmp_path_factory.mktemp("reports")
    for n_bits, evaluation in evaluations.items():
        evaluation.write(root / str(n_bits))
    return {n_bits: root / str(n_bits) for n_bits in evaluations}


@pytest.fixture
def own(written, tmp_path) -> dict[int, Path]:
    """Copies that a test may change."""
    return {n_bits: shutil.copytree(folder, tmp_path / str(n_bits)) for n_bits, folder in written.items()}


def report_alone(evaluation: Evaluation, folder: Path) -> Path:
    folder.mkdir()
    (folder / "report.json").write_text(evaluation.report.as_json())
    return folder


def rows(text: str, title: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    lines = text.split(f"## {title}\n\n")[1].split("\n\n")[0].splitlines()[2:]
    return [[part.strip() for part in line.strip("|").split("|")] for line in lines]


def test_every_figure_is_that_of_the_evaluation(evaluations, written, checkpoints, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(written[8]), str(written[12] / "report.json")])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for place, n in enumerate((5, 20)):
        table = rows(text, f"N = {n}")
        assert [row[:2] for row in table] == [["A", "8"], ["B", "12"]]
        for row, evaluation in zip(table, evaluations.values(), strict=True):
            score = evaluation.report.scores[place]
            expected = []
            for value in (score.mean_average_precision, score.precision):
                expected += [f"{value.expected:.4f}", f"{value.low:.4f} to {value.high:.4f}"]
                expected += [f"{value.worst:.4f} to {value.best:.4f}"]
            expected.insert(3, f"{score.as_served:.4f}")
            assert [cell.strip("*") for cell in row[2:]] == expected
    for path in checkpoints.values():
        assert load_header(path).fingerprint[:12] in text
    assert evaluations[8].report.data["query_sha256"] in text


def test_queries_are_compared_one_by_one(evaluations, written):
    table = rows(as_markdown(load_entries([written[8], written[12], written[8]])), "Query by query")
    assert [row[:2] for row in table] == [
        [pair, figure] for pair in ("B - A", "C - A") for figure in ("AP@5", "precision@5", "AP@20", "precision@20")
    ]
    for row in table[:4]:
        first, second = (np.array(evaluations[n_bits].per_query[row[1]]) for n_bits in (8, 12))
        interval = bootstrap(second - first)
        assert row[2:4] == [f"**{second.mean() - first.mean():+.4f}**", f"{interval.low:+.4f} to {interval.high:+.4f}"]
        better, worse, equal = map(int, row[4:])
        assert better == sum(b > a + 1e-9 for a, b in zip(first, second, strict=True)) > 0
        assert worse == sum(b < a - 1e-9 for a, b in zip(first, second, strict=True)) > 0
        assert equal == 15 - better - worse
    for row in table[4:]:
        assert row[2:] == ["**+0.0000**", "+0.0000 to +0.0000", "0", "0", "15"]


def test_the_other_way_round_gains_become_losses(written):
    there, back = (
        rows(as_markdown(load_entries([written[a], written[b]])), "Query by query") for a, b in ((8, 12), (12, 8))
    )
    for one, other in zip(there, back, strict=True):
        assert float(one[2].strip("*")) == -float(other[2].strip("*"))
        assert one[4:] == [other[5], other[4], other[6]]


def relabelled(part: Split) -> Split:
    labels = part.labels.copy()
    labels[0] = 1 - labels[0]
    return replace(part, labels=labels)


@pytest.mark.parametrize(
    ("splits", "options", "reason"),
    [
        (SPLITS, {"normalizer": "possible"}, "AP is divided by 'retrieved' in one and by 'possible' in the other"),
        (replace(SPLITS, query=relabelled(SPLITS.query)), {}, "the query split differs (query_sha256 "),
        (replace(SPLITS, database=relabelled(SPLITS.database)), {}, "the database split differs (database_sha256 "),
        (replace(SPLITS, query=SPLITS.query.take(range(14))), {}, "one has 15 queries, the other 14"),
        (replace(SPLITS, database=SPLITS.database.take(range(49))), {}, "one has 50 database images, the other 49"),
        (
            replace(SPLITS, fingerprint="e" * 64),
            {},
            "three splits differ (splits_sha256 ffffffffffff and eeeeeeeeeeee)",
        ),
    ],
)
def test_another_protocol_is_refused_with_the_reason(splits, options, reason, written, checkpoints, tmp_path, capsys):
    other = report_alone(evaluated(checkpoints[12], splits, **options), tmp_path / "other")
    for pair in ([written[8], other], [written[8], written[12], other]):
        with pytest.raises(SystemExit) as ended:
            main(["compare", *map(str, pair)])
        assert ended.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert reason in said.err
        assert f"{other / 'report.json'}) are of different protocols" in said.err
        assert len(said.err.splitlines()) == 1


def test_seed_and_length_and_place_of_the_data_may_differ(evaluations, checkpoints):
    other = evaluated(checkpoints[12], seed=3, data_name="elsewhere").report
    assert differences(evaluations[8].report, other) == []


def test_a_certificate_without_hashes_is_refused(own):
    path = own[12] / "report.json"
    content = json.loads(path.read_text())
    del content["data"]["query_sha256"]
    path.write_text(json.dumps(content))
    with pytest.raises(BadConfig, match="does not say query_sha256, the hash of the query split"):
        load_entries([own[8], own[12]])


def test_only_figures_at_a_common_n_are_compared(written, checkpoints, tmp_path):
    some = report_alone(evaluated(checkpoints[12], ns=(20, 30)), tmp_path / "some")
    text = as_markdown(load_entries([written[8], some]))
    assert "## N = 20" in text
    assert "## N = 5\n" not in text
    assert "## N = 30" not in text
    assert "A: figures at N = 5 are left out" in text
    assert "B: figures at N = 30 are left out" in text
    none = report_alone(evaluated(checkpoints[12], ns=(7,)), tmp_path / "none")
    with pytest.raises(BadConfig, match=r"no N in common \(A has N = 5, 20; B has N = 7\)"):
        load_entries([written[8], none])


def test_without_tables_there_is_no_paired_comparison_and_it_is_said(own):
    (own[12] / "per_query.csv").unlink()
    text = as_markdown(load_entries([own[8], own[12]]))
    assert "No paired comparison: it needs a per_query.csv" in text
    assert "B: no per_query.csv beside the report" in text
    assert "A: no per_query.csv" not in text


def test_a_table_of_another_evaluation_is_refused(own):
    shutil.copy(own[8] / "per_query.csv", own[12] / "per_query.csv")
    with pytest.raises(BadConfig, match=r"per_query.csv is not of the evaluation in report.json: the mean of its AP@5"):
        load_entries([own[8], own[12]])


def test_a_table_in_another_order_is_refused(own):
    path = own[12] / "per_query.csv"
    head, *body = path.read_text().splitlines()
    path.write_text("\n".join([head, *reversed(body)]) + "\n")
    with pytest.raises(BadConfig, match="are not of the same queries in one order"):
        load_entries([own[8], own[12]])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda lines: lines[:1], "it has no queries"),
        (lambda lines: [*lines[:-1], lines[-1][:9]], "damaged"),
        (lambda lines: [lines[0].replace("query", "image"), *lines[1:]], "it has no column 'query'"),
        (lambda lines: [], "it has no queries"),
    ],
)
def test_a_damaged_table_is_one_sentence(damage, reason, own):
    path = own[12] / "per_query.csv"
    path.write_text("\n".join(damage(path.read_text().splitlines())))
    with pytest.raises(BadConfig, match=reason) as raised:
        load_entries([own[8], own[12]])
    assert str(path) in str(raised.value)


def test_a_value_that_is_no_number_is_one_sentence(own):
    path = own[12] / "per_query.csv"
    with path.open(newline="") as file:
        table = list(csv.reader(file))
    column = table[0].index("AP@5")
    for bad, reason in (("many", "could not convert"), ("nan", "AP@5 holds something that is not finite")):
        table[3][column] = bad
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(table)
        with pytest.raises(BadConfig, match=reason):
            load_entries([own[8], own[12]])


def test_the_comparison_is_written_too_but_over_nothing_that_it_reads(own, tmp_path, capsys):
    def run(out: Path) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["compare", str(own[8]), str(own[12]), "--out", str(out)])
        return ended.value.code

    assert run(tmp_path / "new" / "both.md") == 0
    assert capsys.readouterr().out == (tmp_path / "new" / "both.md").read_text()
    for taken in (own[8] / "report.json", own[12] / "per_query.csv"):
        before = taken.read_bytes()
        assert run(taken) == 2
        assert "is one of the files that are compared" in capsys.readouterr().err
        assert taken.read_bytes() == before
    assert run(own[8]) == 2
    assert "is a folder: name a Markdown file" in capsys.readouterr().err
    assert load_report(own[8] / "report.json").n_bits == 8


def test_what_cannot_be_compared_is_one_sentence(own, tmp_path):
    with pytest.raises(BadConfig, match="2 to 26 reports can be compared, not 1"):
        load_entries([own[8]])
    with pytest.raises(BadConfig, match=r"the report .*report.json cannot be read: No such file"):
        load_entries([own[8], tmp_path])
    path = own[12] / "report.json"
    path.write_text(path.read_text().replace('"schema_version": 3', '"schema_version": 4'))
    with pytest.raises(BadConfig, match="has report schema 4, but this hashseek reads 3: upgrade hashseek"):
        load_entries([own[8], own[12]])
