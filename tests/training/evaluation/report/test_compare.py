"""Reports side by side: the metrics are those of the evaluations, and other protocols are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import as_csv
from hashseek.retrieval.metrics import bootstrap, holm, queries_and_seeds, randomization_test
from hashseek.training.data.splits import Split, Splits
from hashseek.training.evaluation.assembly import Evaluation, EvaluationOptions
from hashseek.training.evaluation.evaluate import evaluate
from hashseek.training.evaluation.report.citation import protocol_in_words
from hashseek.training.evaluation.report.compare import as_markdown, differences, load_entries
from hashseek.training.report_format import LATEX
from support.in_process import run_command
from support.vector_models import VECTOR_SPLITS, save_vector_model

pytestmark = pytest.mark.xdist_group("compare")  # one process draws the plots of a report for all tests


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("compare")
    return {n_bits: save_vector_model(folder / str(n_bits), n_bits, seed=n_bits) for n_bits in (8, 12)}


def evaluated(checkpoint: Path, splits: Splits = VECTOR_SPLITS, **options) -> Evaluation:
    return evaluate(checkpoint, splits, EvaluationOptions(**{"data_name": "v", "ns": (5, 20), **options}), n_points=0)


def write(evaluation: Evaluation, folder: Path) -> None:
    """The files that `compare` reads, without the plots, which take seconds."""
    folder.mkdir()
    (folder / "report.json").write_text(evaluation.report.as_json())
    columns = evaluation.per_query
    (folder / "per_query.csv").write_bytes(as_csv([columns, *zip(*columns.values(), strict=True)]))


@pytest.fixture(scope="module")
def evaluations(checkpoints) -> dict[int, Evaluation]:
    return {n_bits: evaluated(path) for n_bits, path in checkpoints.items()}


@pytest.fixture(scope="module")
def written(evaluations, tmp_path_factory) -> dict[int, Path]:
    """Their folders, the first as `hashseek evaluate` writes it. Not to be written to."""
    root = tmp_path_factory.mktemp("reports")
    evaluations[8].write(root / "8")
    write(evaluations[12], root / "12")
    return {n_bits: root / str(n_bits) for n_bits in evaluations}


@pytest.fixture
def own(written, tmp_path) -> dict[int, Path]:
    """Copies that a test may change."""
    return {n_bits: shutil.copytree(folder, tmp_path / str(n_bits)) for n_bits, folder in written.items()}


def rows(text: str, title: str) -> list[list[str]]:
    """Cells of the tables below a heading, without their heads."""
    lines = text.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    tables = [[part.strip().strip("*") for part in line.strip("|").split("|")] for line in lines if "|" in line]
    rules = [place for place, row in enumerate(tables) if set("".join(row)) <= {"-", ":"}]
    return [row for place, row in enumerate(tables) if place not in rules and place + 1 not in rules]


def test_every_metric_is_that_of_the_evaluation(evaluations, written, capsys):
    code, text, _ = run_command(capsys, "compare", written[8], written[12] / "report.json")
    assert code == 0
    for place, n in enumerate((5, 20)):
        table = rows(text, f"N = {n}")
        scores = [evaluation.report.scores[place] for evaluation in evaluations.values()]
        values = [*(score.mean_average_precision for score in scores), *(score.precision for score in scores)]
        served = [[f"{score.as_served:.4f}"] for score in scores] + [[], []]
        for row, letter, value, more in zip(table, "ABAB", values, served, strict=True):
            numbers = [value.expected, value.low, value.high, value.worst, value.best]
            mean, *bounds = (f"{number:.4f}" for number in numbers)
            expected = [mean, f"{bounds[0]} to {bounds[1]}", f"{bounds[2]} to {bounds[3]}"]
            assert [row[0], *row[2:]] == [letter, *expected, *more]
    for evaluation in evaluations.values():
        assert evaluation.report.fingerprint[:12] in text
    assert evaluations[8].report.data["query_sha256"] in text
    assert [row[6:] for row in rows(text, "Reports")] == [["8", "–"], ["12", "–"]]
    assert "| mAP@5 | 95 % interval | worst to best | as served |" in text
    assert "- B: the checkpoint was trained on other splits" in text


def test_queries_are_compared_one_by_one(evaluations, written):
    table = rows(as_markdown(load_entries([written[8], written[12], written[8]])), "Query by query")
    metrics = ("AP@5", "precision@5", "AP@20", "precision@20")
    assert [row[:2] for row in table] == [[pair, metric] for pair in ("B - A", "C - A") for metric in metrics]
    for row in table[:4]:
        first, second = (np.array(evaluations[n_bits].per_query[row[1]]) for n_bits in (8, 12))
        interval = bootstrap(second - first)
        assert row[2:4] == [f"{second.mean() - first.mean():+.4f}", f"{interval.low:+.4f} to {interval.high:+.4f}"]
        assert 0 < float(row[4]) <= 1
        better, worse, equal = map(int, row[6:])
        assert better == sum(b > a + 1e-9 for a, b in zip(first, second, strict=True)) > 0
        assert worse == sum(b < a - 1e-9 for a, b in zip(first, second, strict=True)) > 0
        assert equal == 15 - better - worse
    for row in table[4:]:
        assert row[2:] == ["+0.0000", "+0.0000 to +0.0000", "1.0000", "–", "0", "0", "15"]


def relabelled(part: Split) -> Split:
    labels = part.labels.copy()
    labels[0] = 1 - labels[0]
    return replace(part, labels=labels)


def renamed(part: Split) -> Split:
    return replace(part, paths=tuple(path.with_name(f"other {path.name}") for path in part.paths))


@pytest.mark.parametrize(
    ("splits", "options", "reason"),
    [
        (VECTOR_SPLITS, {"normalizer": "possible"}, "normalizer"),
        (replace(VECTOR_SPLITS, query=relabelled(VECTOR_SPLITS.query)), {}, "query_sha256"),
        (replace(VECTOR_SPLITS, database=relabelled(VECTOR_SPLITS.database)), {}, "database_sha256"),
        (replace(VECTOR_SPLITS, query=renamed(VECTOR_SPLITS.query)), {}, "query_sha256"),
        (replace(VECTOR_SPLITS, query=VECTOR_SPLITS.query.take(range(14))), {}, "queries"),
    ],
)
def test_another_protocol_is_refused_with_the_reason(splits, options, reason, evaluations, written, checkpoints, own):
    other = evaluated(checkpoints[12], splits, **options)
    found = differences(evaluations[8].report, other.report)
    assert any(reason in line for line in found)
    (own[12] / "report.json").write_text(other.report.as_json())
    (own[12] / "per_query.csv").unlink()
    for places in ([written[8], own[12]], [written[8], written[12], own[12]]):
        with pytest.raises(BadConfig, match=reason):
            load_entries(places)


def test_labels_that_only_one_of_them_was_not_trained_with_make_another_protocol(evaluations):
    report = evaluations[8].report
    assert differences(report, replace(report, held_out=["a"]))


def test_seed_length_name_of_the_data_and_training_split_may_differ(evaluations, checkpoints):
    other_training = replace(VECTOR_SPLITS, fingerprint="e" * 64)
    other = evaluated(checkpoints[12], other_training, seed=3, data_name="elsewhere").report
    assert differences(evaluations[8].report, other) == []


def test_only_metrics_at_a_common_n_are_compared(written, checkpoints, tmp_path):
    write(evaluated(checkpoints[12], ns=(20, 30)), tmp_path / "some")
    text = as_markdown(load_entries([written[8], tmp_path / "some"]))
    assert "## N = 20" in text
    assert "## N = 5\n" not in text
    assert "## N = 30" not in text
    assert "A: N = 5 is left out" in text
    write(evaluated(checkpoints[12], ns=(7,)), tmp_path / "none")
    with pytest.raises(BadConfig):
        load_entries([written[8], tmp_path / "none"])


def test_without_tables_there_is_no_paired_comparison_and_a_note(own):
    (own[12] / "per_query.csv").unlink()
    text = as_markdown(load_entries([own[8], own[12]]))
    assert "Query by query" not in text
    assert "B: there is no per_query.csv" in text
    assert "A: there is no per_query.csv" not in text
    assert "A: there is no per_query.csv" in as_markdown(load_entries([own[12], own[8]]))


def reverse_rows(path: Path) -> None:
    head, *body = path.read_text().splitlines()
    path.write_text("\n".join([head, *reversed(body)]) + "\n")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: shutil.copy(path.parents[1] / "8" / "per_query.csv", path),  # of another evaluation
        reverse_rows,
        lambda path: path.write_text(""),
        lambda path: path.write_text(path.read_text().splitlines()[0]),
        lambda path: path.write_text(path.read_text()[:-200]),
        lambda path: path.write_text(path.read_text().replace("query", "image", 1)),
        lambda path: path.write_text(path.read_text().replace(",AP@20,", ",AP@21,")),  # of another N
        lambda path: path.write_text(path.read_text().replace(",0.", ",many")),
        lambda path: path.write_text(path.read_text().replace(",0.", ",nan")),
    ],
)
def test_a_table_that_does_not_belong_to_its_report_is_refused(damage, own):
    damage(own[12] / "per_query.csv")
    with pytest.raises(BadConfig, match=r"per_query.csv"):
        load_entries([own[8], own[12]])


def test_a_comparison_needs_two_readable_reports_with_all_hashes(own, tmp_path):
    path = own[12] / "report.json"
    content = json.loads(path.read_text())
    del content["data"]["query_sha256"]
    path.write_text(json.dumps(content))
    for places in ([own[8]], [own[8], tmp_path], [own[8], own[12]], [own[12], own[12]]):
        with pytest.raises(BadConfig):
            load_entries(places)


def test_the_comparison_is_written_but_never_over_a_report(own, tmp_path, capsys):
    out = tmp_path / "new" / "both.md"
    code, printed, _ = run_command(capsys, "compare", own[8], own[12], "--out", out)
    assert (code, printed) == (0, out.read_text())
    for taken in (own[8] / "report.json", own[12] / "per_query.csv"):
        before = taken.read_bytes()
        assert run_command(capsys, "compare", own[8], own[12], "--out", taken)[0] == 2
        assert taken.read_bytes() == before
    renamed = own[12].rename(tmp_path / "caf\udce9")
    for table in (own[8] / "per_query.csv", renamed / "per_query.csv"):
        table.write_bytes(table.read_bytes().replace(b"\n", b"\n\xe9").removesuffix(b"\xe9"))  # names of images
    assert run_command(capsys, "compare", own[8], renamed, "--out", out)[0] == 0
    assert b"caf\xe9" in out.read_bytes()


def test_seeds_of_one_method_are_averaged_and_methods_tested_with_holms_correction(tmp_path, capsys):
    kinds = [("hyp2", 0), ("dpsh", 0), ("hyp2", 1), ("hyp2", 2), ("csq_&", 0)]
    made: list[Evaluation] = []
    for place, (loss, seed) in enumerate(kinds):
        training = {"loss": {"name": loss}, "train": {"seed": seed, "epochs": 2}, "splits_sha256": "f" * 64}
        made.append(evaluated(save_vector_model(tmp_path / f"{place}.m", 8, seed=place, training=training)))
        write(made[-1], tmp_path / str(place))
    folders = [tmp_path / str(place) for place in range(5)]
    code, text, _ = run_command(capsys, "compare", *folders, "--latex", tmp_path / "table.tex")
    assert code == 0
    of_seeds = [made[place].report.scores[1].mean_average_precision.expected for place in (0, 2, 3)]
    assert [row[6:] for row in rows(text, "Reports")] == [["8", str(seed)] for _, seed in kinds]
    assert "## Notes" not in text
    table = rows(text, "Methods")
    assert [row[:4] for row in table] == [
        ["A,C,D", "hyp2, mlp:6-16", "8", "3"],
        ["B", "dpsh, mlp:6-16", "8", "1"],
        ["E", "csq_&, mlp:6-16", "8", "1"],
    ]
    assert table[0][5] == f"{np.mean(of_seeds):.4f} ± {np.std(of_seeds, ddof=1):.4f}"
    per_query = [np.array(each.per_query["AP@20"]) for each in made]
    mean = np.mean([per_query[place] for place in (0, 2, 3)], axis=0)
    p_values = holm([randomization_test(per_query[place] - mean) for place in (1, 4)])
    paired = {(row[0], row[1]): row for row in rows(text, "Query by query")}
    for letter, place, p_value in zip("BE", (1, 4), p_values, strict=True):
        row = paired[f"{letter} - A,C,D", "AP@20"]
        assert row[2] == f"{(per_query[place] - mean).mean():+.4f}"
        assert row[4:6] == [f"{p_value:.4f}", "–"], "one seed"
    latex = (tmp_path / "table.tex").read_text().splitlines()
    value = table[2][5]
    assert latex.count("\\midrule") == 1
    [caption] = [line for line in latex if line.startswith("\\caption")]
    assert protocol_in_words(made[0].report).translate(LATEX) in caption
    assert any(
        line.startswith("E & csq\\_\\&, mlp:6-16 & 8 & 1") and line.endswith(f"& {value} \\\\") for line in latex
    )
    assert any(f"{np.mean(of_seeds):.4f} $\\pm$ {np.std(of_seeds, ddof=1):.4f}" in line for line in latex)
    assert run_command(capsys, "compare", *folders, "--latex", folders[0] / "report.json")[0] == 2


def test_methods_with_the_same_seeds_are_also_compared_over_seeds(tmp_path):
    kinds = [("hyp2", 0), ("dpsh", 1), ("hyp2", 1), ("dpsh", 0), ("csq", 0), ("csq", 2), ("dsh", 0), ("dsh", 1)]
    kinds += [("idhn", 0), ("idhn", 1), ("idhn", 2)]
    per_query = []
    for place, (loss, seed) in enumerate(kinds):
        training = {"loss": {"name": loss}, "train": {"seed": seed}}
        made = evaluated(save_vector_model(tmp_path / f"{place}.m", 8, seed=place, training=training))
        write(made, tmp_path / str(place))
        per_query.append(np.array(made.per_query["AP@20"]))
    table = rows(as_markdown(load_entries([tmp_path / str(place) for place in range(len(kinds))])), "Query by query")
    paired = {(row[0], row[1]): row for row in table}
    p_values = holm(
        [
            queries_and_seeds(np.array([per_query[one] - per_query[0], per_query[other] - per_query[2]]))
            for one, other in ((3, 1), (6, 7))
        ]
    )
    for pair, p_value in zip(("B,D - A,C", "G,H - A,C"), p_values, strict=True):
        assert paired[pair, "AP@20"][5] == f"{p_value:.4f}"
    assert paired["E,F - A,C", "AP@20"][5] == "–", "other seeds"
    assert paired["I,J,K - A,C", "AP@20"][5] == "–", "more seeds"
    (tmp_path / "3" / "per_query.csv").unlink()  # one seed alone is not the mean over both
    assert "Query by query" not in as_markdown(load_entries([tmp_path / str(place) for place in (0, 2, 1, 3)]))


def test_more_reports_than_letters_are_compared(own):
    place = own[next(iter(own))]
    entries = load_entries([place] * 29)
    assert [entries[i].letter for i in (0, 25, 26, 28)] == ["A", "Z", "AA", "AC"]


def test_the_same_seed_twice_is_two_methods(tmp_path):
    training = {"loss": {"name": "hyp2"}, "train": {"seed": 0}}
    for place in (0, 1):
        checkpoint = save_vector_model(tmp_path / f"{place}.m", 8, seed=place, training=training)
        write(evaluated(checkpoint), tmp_path / str(place))
    table = rows(as_markdown(load_entries([tmp_path / "0", tmp_path / "1"])), "Methods")
    assert [row[0] for row in table] == ["A", "B"]
    # As the best and the last epoch of one run, and one of another seed: it could belong to either.
    checkpoint = save_vector_model(tmp_path / "2.m", 8, seed=2, training={**training, "train": {"seed": 1}})
    write(evaluated(checkpoint), tmp_path / "2")
    table = rows(as_markdown(load_entries([tmp_path / "2", tmp_path / "0", tmp_path / "1"])), "Methods")
    assert [row[0] for row in table] == ["A", "B", "C"]
    table = rows(as_markdown(load_entries([tmp_path / "2", tmp_path / "0"])), "Methods")
    assert [row[0] for row in table] == ["A,B"]
    longer = save_vector_model(tmp_path / "3.m", 12, seed=2, training={**training, "train": {"seed": 1}})
    write(evaluated(longer), tmp_path / "3")
    table = rows(as_markdown(load_entries([tmp_path / "3", tmp_path / "0"])), "Methods")
    assert [row[0] for row in table] == ["A", "B"]
