"""The report's folder: values that are right, files that agree with each other, a page that needs nothing else."""

import csv
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from hashseek.retrieval.codes import pack
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.metrics import histograms
from hashseek.training.evaluation.report import (
    Part,
    Report,
    as_markdown,
    chance,
    load_report,
    score_all,
    summary,
    values_of,
)
from hashseek.training.evaluation.report.build import bits
from hashseek.training.evaluation.report.examples import confusions, drawn, examples, worst
from hashseek.training.evaluation.report.folder import as_csv, query_columns, write_report
from hashseek.training.evaluation.report.projection import group_by_label, project
from support import hamming_oracle as hamming

N_BITS, NS = 10, (5, 20)
NAMES = ("sky", "<b>bold & $math$</b>", "a|b", "sea", "never")


def random_part(rng: np.random.Generator, n: int, folder: Path, kind: str) -> Part:
    outputs = rng.standard_normal((n, N_BITS)).astype(np.float32)
    labels = (rng.random((n, len(NAMES))) < 0.35).astype(np.uint8)
    labels[:, -1] = 0
    return Part(pack(outputs), outputs, labels, [folder / f"{kind} {i}.png" for i in range(n)])


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> tuple[Part, Part]:
    """12 queries and 40 database images, of which one cannot be decoded."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("pictures")
    made = random_part(rng, 12, folder, "query"), random_part(rng, 40, folder, "database")
    for part in made:
        for path in part.paths:
            Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
    made[1].paths[7].write_bytes(b"no picture")
    return made


@pytest.fixture(scope="module")
def found(parts):
    query, database = parts
    return histograms(query.codes, database.codes, query.labels, database.labels, n_bits=N_BITS, graded=True)


@pytest.fixture(scope="module")
def report(parts, found) -> Report:
    query, database = parts
    distances, ids = hamming.search(query.codes, database.codes, 40)
    scores = score_all(found, query.labels, ns=NS, normalizer="retrieved", served=[np.full(12, 0.5)] * 2)
    values = values_of(found, query.labels, database.labels, NAMES, scores)
    ap = scores.per_query["AP@20"].expected
    ranking = {"query": query, "database": database, "names": NAMES, "ids": ids, "distances": distances}
    return Report(
        title="a <title> & more",
        normalizer="retrieved",
        n_bits=N_BITS,
        fingerprint="f" * 64,
        data={"queries": 12, "database": 40, "overlaps": {"query_and_train": 0}, "chance_(share)": chance(found)},
        model={"backbone": "none"},
        command="hashseek evaluate '<x>'",
        bits=bits(database, n_bits=N_BITS),
        notes=["a note with <markup>"],
        confusions=confusions(query.labels, database.labels, NAMES, ids[:, :10]),
        examples=examples(drawn(12), average_precision=ap, **ranking),
        worst=examples(worst(ap, found.n_relevant), average_precision=ap, **ranking),
        baseline=scores.scores,
        baseline_name="Something else",
        baseline_precision=values["curves"].precision,
        **values,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory, report, parts, found) -> Path:
    query, database = parts
    out = tmp_path_factory.mktemp("report")
    scores = score_all(found, query.labels, ns=NS, normalizer="retrieved")
    table = query_columns(
        [path.name for path in query.paths],
        [[NAMES[i] for i in np.flatnonzero(row)] for row in query.labels],
        found.n_relevant,
        np.zeros(12, np.int64),
        scores.per_query,
        {"AP@5": np.linspace(0, 1, 12)},
    )
    files = write_report(
        out,
        report,
        per_query=table,
        points=project(database, NAMES, n_bits=N_BITS, n_points=30, seed=0),
        query_paths=query.paths,
        database_paths=database.paths,
    )
    assert files[0] == out / "report.html"
    assert sorted(files) == sorted(path for path in out.rglob("*") if path.is_file())
    return out


class Page(HTMLParser):
    """Tags with their attributes, and text, of a page; tags must nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_needs_nothing_from_elsewhere_and_runs_no_script(folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "b>bold"}
    for _, attributes in page.tags:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "data"):
                assert value.startswith(("#", "data:image/")), value
            assert not name.startswith("on")
    assert not re.search(r"url\((?!#)|@import", text)
    assert "default-src 'none'" in text
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_the_page_shows_text_as_text(folder, report):
    page = Page((folder / "report.html").read_text())
    words = " ".join(page.words)
    for text in ("a <title> & more", "a note with <markup>", "<b>bold & $math$</b>", "hashseek evaluate '<x>'"):
        assert text in words
    assert f"{report.main.mean_average_precision.expected:.4f}" in words
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    n_broken = sum(hit.row == 7 for example in (*report.examples, *report.worst) for hit in example.hits)
    assert n_broken
    assert len(pictures) + n_broken == 11 * (len(report.examples) + len(report.worst))
    assert words.count("is not an image of a kind") == n_broken
    ids = [attributes["id"] for tag, attributes in page.tags if tag != "g" and "id" in attributes]
    assert len(ids) == len(set(ids))


def test_frames_say_how_many_labels_are_shared(folder, report):
    text = (folder / "report.html").read_text()
    shares = [hit.share for example in (*report.examples, *report.worst) for hit in example.hits]
    for kind, n in (
        ("good", sum(share >= 0.75 for share in shares)),
        ("bad", sum(share <= 0.25 for share in shares)),
        ("some", sum(0.25 < share < 0.75 for share in shares)),
    ):
        assert text.count(f'<li class="{kind}"') == n > 0


def test_figures_stand_alone_and_follow_the_page(folder):
    svgs = sorted((folder / "figures").glob("*.svg"))
    names = ["calibration", "distances", "precision_curve", "precision_recall", "tsne_codes", "tsne_outputs"]
    assert [path.stem for path in svgs] == names
    for path in svgs:
        text = path.read_text()
        assert not re.search(r"(?:stroke|fill): #", text), path.name  # every colour is a variable with a fallback
        assert "var(--text, #16191b)" in text
        with Image.open(path.with_suffix(".png")) as picture:
            assert picture.width >= 900


def test_json_goes_there_and_back_and_a_newer_schema_is_refused(folder, report, tmp_path):
    path = folder / "report.json"
    assert load_report(path) == report
    stored = json.loads(path.read_text())
    assert "NaN" not in path.read_text()
    assert stored["labels"][-1] == {
        "name": "never",
        "queries": 0,
        "database": 0,
        "mean_average_precision": None,
        "precision": None,
    }
    other = tmp_path / "report.json"
    for changed, sentence in (
        ({**stored, "schema_version": 4}, "has report schema 4, but this hashseek reads 3: upgrade hashseek"),
        ({"schema_version": 2}, "has report schema 2, but this hashseek reads 3: run `hashseek evaluate` again"),
        ({**stored, "n_bits": "many"}, "is not a report .n_bits: .*: evaluate again"),
        ([], "is not a report"),
    ):
        other.write_text(json.dumps(changed))
        with pytest.raises(BadConfig, match=sentence):
            load_report(other)
    other.write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match="cannot be read: it is not text"):
        load_report(other)
    with pytest.raises(BadConfig, match="cannot be read: No such file"):
        load_report(tmp_path / "none.json")


def test_tables_per_query_hold_what_the_scores_are_means_of(folder, report):
    rows = list(csv.DictReader(io.StringIO((folder / "per_query.csv").read_text())))
    assert len(rows) == 12
    for score in report.scores:
        for column, value in (("AP", score.mean_average_precision), ("nDCG", score.ndcg)):
            for suffix, mean in (("", value.expected), ("_worst", value.worst), ("_best", value.best)):
                assert np.mean([float(row[f"{column}@{score.n}{suffix}"]) for row in rows]) == pytest.approx(mean)
    table = pyarrow.parquet.read_table(folder / "per_query.parquet").to_pydict()
    assert list(table) == list(rows[0])
    assert [str(value) for value in table["AP@5_as_served"]] == [row["AP@5_as_served"] for row in rows]
    assert table["labels"] == [row["labels"] for row in rows]
    assert as_csv({"name": ["b\udcffd"]}) == b"name\r\nb\xffd\r\n"


def test_scores_carry_intervals_bounds_and_the_share_of_ties(report, parts):
    for score in report.scores:
        for value in (score.mean_average_precision, score.precision, score.ndcg, score.acg, score.wap, score.recall):
            assert value.worst <= value.expected <= value.best
            assert value.low < value.expected < value.high
        assert 0 <= score.tied <= 1
        assert score.as_served == 0.5
    assert report.main_n == 20
    query, database = parts
    d = hamming.distances(query.codes, database.codes)
    relevant = query.labels.astype(int) @ database.labels.T > 0
    assert report.distances.relevant == [int(((d == r) & relevant).sum()) for r in range(N_BITS + 1)]
    assert report.distances.intra == pytest.approx(d[relevant].mean())
    assert [row.database for row in report.labels] == database.labels.sum(axis=0).tolist()
    assert report.curves.ns[-1] == 40
    assert report.curves.recall[-1] == pytest.approx(relevant.any(axis=1).mean())


def test_confused_labels_are_those_of_irrelevant_hits(parts):
    query, database = parts
    ids = hamming.search(query.codes, database.codes, 10)[1]
    expected, chance_of = np.zeros((5, 5)), np.zeros((5, 5))
    for row in range(12):
        a = query.labels[row] / max(query.labels[row].sum(), 1)
        unlike = database.labels @ query.labels[row] == 0
        n_wrong, others = 0.0, np.zeros(5)
        for item in range(40):
            if unlike[item] and database.labels[item].any():
                b = database.labels[item] / database.labels[item].sum()
                others += b
                if item in ids[row]:
                    expected += np.outer(a, b)
                    n_wrong += 1
        if n_wrong:
            chance_of += np.outer(a, others / others.sum() * n_wrong)
    found = confusions(query.labels, database.labels, NAMES, ids, n=25)
    assert len(found) == (expected > 0).sum()
    assert [pair.share for pair in found] == sorted((pair.share for pair in found), reverse=True)
    for pair in found:
        place = NAMES.index(pair.asked), NAMES.index(pair.returned)
        assert pair.share == pytest.approx(expected[place] / expected.sum(), rel=1e-5)
        chance_share = chance_of[place] / chance_of.sum()
        assert pair.lift == pytest.approx(pair.share / chance_share, rel=1e-5)
    assert confusions(np.ones_like(query.labels), np.ones_like(database.labels), NAMES, ids) == []


def test_worst_queries_leave_out_those_for_which_nothing_is_relevant():
    assert worst(np.array([0.0, 0.5, 0.1, 0.1]), np.array([0, 3, 3, 3]), n=2) == [2, 3]
    assert drawn(3) == [0, 1, 2]
    assert drawn(100, seed=1) == drawn(100, seed=1) != drawn(100, seed=2)


def test_points_have_the_colour_of_their_rarest_frequent_label(parts):
    labels = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], np.uint8)
    group, names = group_by_label(labels, ("a", "b", "c"))
    assert names == ["a", "b", "c"]
    assert group.tolist() == [1, 0, 2, -1]
    database = parts[1]
    assert project(database, NAMES, n_bits=N_BITS, n_points=5, seed=0) == {}
    same = Part(database.codes[:1].repeat(40, 0), database.outputs, database.labels, database.paths)
    assert list(project(same, NAMES, n_bits=N_BITS, n_points=30, seed=0)) == ["outputs"]
    places = [project(database, NAMES, n_bits=N_BITS, n_points=30, seed=0)["codes"][0] for _ in range(2)]
    np.testing.assert_array_equal(*places)


def test_markdown_has_the_headline_and_escapes_what_would_break_a_table(report):
    text = as_markdown(report)
    value = report.main.mean_average_precision
    assert f"| 20 | **{value.expected:.4f}** |" in text
    assert "| a\\|b |" in text
    assert summary(report) in text
    assert "## Something else" in text
    assert "- a note with <markup>" in text


def test_drawing_libraries_are_loaded_only_when_a_report_is_written():
    program = (
        "import sys, hashseek.training.evaluation.report.folder, hashseek.training.evaluation.report.projection\n"
        "import hashseek.training.cli.evaluate\n"
        "print([name for name in ('matplotlib', 'sklearn', 'pyarrow', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
