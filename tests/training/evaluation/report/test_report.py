"""The report's folder: values that are right, files that agree with each other, a page that needs nothing else."""

import html
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hashseek.retrieval.codes import pack
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.metrics import bit_statistics, bootstrap, histograms
from hashseek.training.data.datasets import SOURCES
from hashseek.training.data.splits import Split
from hashseek.training.evaluation.report.citation import as_latex, cited, parsed
from hashseek.training.evaluation.report.examples import confusions, examples, random_queries, worst_queries
from hashseek.training.evaluation.report.folder import Evaluation
from hashseek.training.evaluation.report.markdown import as_markdown, summary
from hashseek.training.evaluation.report.measurements import Measurements, Ranking, label_scores, measure_histograms
from hashseek.training.evaluation.report.page import _thumbnail
from hashseek.training.evaluation.report.plots import draw_all
from hashseek.training.evaluation.report.projection import group_by_label, project
from hashseek.training.evaluation.report.schema import (
    ComparedModel,
    EvaluationReport,
    MeanValue,
    RankingScore,
    load_report,
)
from hashseek.training.evaluation.report.sections import sections
from hashseek.training.losses import LOSSES, loss_class
from hashseek.training.plotting import SERIES
from support import hamming_oracle as hamming
from support.paths import ROOT

pytestmark = pytest.mark.xdist_group("report")  # one process draws for all tests
N_BITS, NS = 10, (5, 20)
NAMES = ("sky", "<b>bold & $math$</b>", "a|b", "sea", "never")


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> tuple[Split, Split]:
    """12 queries and 40 database images of which one cannot be decoded; `vectors` are the outputs."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("pictures")

    def split(n: int, kind: str) -> Split:
        outputs = rng.standard_normal((n, N_BITS)).astype(np.float32)
        labels = (rng.random((n, len(NAMES))) < 0.35).astype(np.uint8)
        labels[:, -1] = 0
        return Split(tuple(folder / f"{kind} {i}.png" for i in range(n)), labels, ("",) * n, outputs)

    made = split(12, "query"), split(40, "database")
    for part in made:
        for path in part.paths:
            Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
    made[1].paths[7].write_bytes(b"no picture")
    return made


@pytest.fixture(scope="module")
def measured(parts) -> Measurements:
    query, database = parts
    codes = [pack(part.vectors) for part in parts]
    found = histograms(*codes, query.labels, database.labels, n_bits=N_BITS, graded=True)
    distances, ids = hamming.search(*codes, 40)
    ranking = Ranking(distances, ids, [np.full(12, 0.5)] * 2)
    return measure_histograms(found, ranking, query.labels, ns=NS, normalizer="retrieved")


@pytest.fixture(scope="module")
def report(parts, measured) -> EvaluationReport:
    query, database = parts
    ap = measured.per_query["AP@20"].expected
    shown = [query, database, NAMES, measured.ranking, ap]
    return EvaluationReport(
        title="a <title> & more",
        scores=measured.scores,
        main_n=measured.main_n,
        curves=measured.curves,
        distances=measured.distances,
        calibration=measured.calibration,
        labels=label_scores(measured, query.labels, database.labels, NAMES),
        normalizer="retrieved",
        n_bits=N_BITS,
        fingerprint="f" * 64,
        data={"queries": 12, "database": 40, "chance_(share_of_relevant_pairs)": 0.4},
        model={"backbone": "none"},
        command="hashseek evaluate '<x>'",
        bits=bit_statistics(pack(database.vectors), n_bits=N_BITS, outputs=database.vectors),
        notes=["a note with <markup>"],
        confusions=confusions(query.labels, database.labels, NAMES, measured.ranking.rows[:, :10]),
        examples=examples(random_queries(12, seed=0), *shown),
        worst=examples(worst_queries(ap, measured.n_relevant), *shown),
        baseline=measured.scores,
        baseline_name="Something else",
        baseline_precision=measured.curves.precision_worst,
        baseline_recall=measured.curves.precision_best,
    )


def projected(database: Split, n_points: int):
    outputs = database.vectors
    return project(outputs, database.labels, NAMES, n_points=n_points, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, report, parts) -> Path:
    query, database = parts
    out = tmp_path_factory.mktemp("report")
    evaluation = Evaluation(report, {"query": ["a"]}, projected(database, 30), query.paths, database.paths)
    files = evaluation.write(out)
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
        if tag not in ("meta", "img", "br"):
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
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "b>bold"}
    for _, attributes in page.tags:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "data"):
                assert value.startswith(("#", "data:image/")), value
            assert not name.startswith("on")
    assert not re.search(r"url\((?!#)|@import", text)
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\s\"'<>)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_the_page_shows_text_as_text_and_every_picture(folder, report, parts):
    page = Page((folder / "report.html").read_text())
    words = " ".join(page.words)
    awkward = ["a <title> & more", "a note with <markup>", "<b>bold & $math$</b>", "hashseek evaluate '<x>'"]
    for text in (*awkward, sections(report)[0].text):
        assert text in words
    assert f"{report.main.mean_average_precision.expected:.4f}" in words
    shown = (*report.examples, *report.worst)
    n_broken = sum(hit.row == 7 for example in shown for hit in example.hits)
    assert n_broken
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) + n_broken == 11 * len(shown)
    for example in shown:
        rows = [(parts[0], example.row, 300), *((parts[1], hit.row, 170) for hit in example.hits if hit.row != 7)]
        expected = [_thumbnail(part.paths[row], "", side=side)["src"] for part, row, side in rows]
        assert {*expected} <= {attributes["src"] for attributes in pictures}
    assert "Rankings" not in page.words  # there are none
    ids = [attributes["id"] for tag, attributes in page.tags if tag != "g" and "id" in attributes]
    assert len(ids) == len(set(ids))
    shares = [hit.share for example in shown for hit in example.hits]
    frames = [attributes.get("class") for tag, attributes in page.tags if tag == "li"]
    assert frames.count("good") == sum(share >= 0.75 for share in shares) > 0
    assert frames.count("bad") == sum(share == 0 for share in shares) > 0
    main = report.main
    cards = (main.mean_average_precision, main.precision, main.ndcg, main.recall)
    assert [words.count(f"Something else: {value.expected:.4f}") for value in cards] == [1] * 4


def test_plots_stand_alone_and_follow_the_page(folder):
    svgs = sorted((folder / "figures").glob("*.svg"))
    names = ["calibration", "distances", "precision_curve", "precision_recall", "tsne_codes", "tsne_outputs"]
    assert [path.stem for path in svgs] == names
    page = (folder / "report.html").read_text()
    for path in svgs:
        text = path.read_text()
        assert text in page
        assert not re.search(r"(?:stroke|fill): #", text), path.name  # every colour is a variable with a fallback
        assert "var(--text, #16191b)" in text
        with Image.open(path.with_suffix(".png")) as picture:
            assert picture.width >= 900


def test_plots_show_the_values_of_the_report(report, parts):
    curves, fitted, points = report.curves, report.calibration, projected(parts[1], 30)
    axes = {name: figure.axes[0] for name, figure in draw_all(report, points).items()}
    lines = {(name, line.get_label()): line.get_data() for name, each in axes.items() for line in each.lines}
    areas = {(name, area.get_label()): area for name, each in axes.items() for area in each.collections}
    upto, radii = curves.ns.index(20) + 1, range(N_BITS + 1)
    for place, expected in {
        ("precision_curve", "expected over ties"): (curves.ns[:upto], curves.precision[:upto]),
        ("precision_curve", "Something else"): (curves.ns[:upto], report.baseline_precision[:upto]),
        ("precision_curve", "share of relevant pairs"): ([0, 1], [0.4, 0.4]),
        ("precision_recall", "over rank"): (curves.recall, curves.precision),
        ("precision_recall", "over Hamming radius"): (curves.radius_recall, np.array(curves.precision_skip, float)),
        ("precision_recall", "Something else"): (report.baseline_recall, report.baseline_precision),
        ("calibration", "fitted at the distance"): (radii, fitted.at_distance),
        ("calibration", "within the radius"): (radii, fitted.within_radius),
    }.items():
        np.testing.assert_array_equal(lines[place], expected)
    band = areas["precision_curve", "worst to best order of ties"].get_paths()[0].vertices[:, 1]
    assert {*band} == {*curves.precision_worst[:upto], *curves.precision_best[:upto]}
    pairs, relevant, irrelevant = map(np.array, (fitted.pairs, report.distances.relevant, report.distances.irrelevant))
    observed = np.stack([radii, relevant / np.maximum(pairs, 1)], axis=1)[pairs > 0]
    np.testing.assert_allclose(areas["calibration", "observed at the distance"].get_offsets(), observed)
    share, mean, other_share, other_mean = (line.get_data(orig=True) for line in axes["distances"].lines)
    np.testing.assert_allclose([share[1], other_share[1]], [relevant / relevant.sum(), irrelevant / irrelevant.sum()])
    assert [mean[0][0], other_mean[0][0]] == [report.distances.intra, report.distances.inter]
    for name, (places, group, labels) in points.items():
        for number, label in enumerate(labels):
            np.testing.assert_array_equal(areas[f"tsne_{name}", label].get_offsets(), places[group == number])
        np.testing.assert_array_equal(areas[f"tsne_{name}", "other labels"].get_offsets(), places[group < 0])


def test_tables_show_the_values_of_the_report(report):
    models = [ComparedModel("dpsh", 8, "a.safetensors", "abcdef" * 9, report.scores, cut_from=12)]
    rankings = [RankingScore("hamming", 20, 0.5, 0.4), RankingScore("float", 20, 0.25, 0.3)]
    shown = {
        section.id: [[dict(zip(table.header, row, strict=True)) for row in table.rows] for table in section.tables]
        for section in sections(replace(report, models=models, rankings=rankings))
    }

    def four(*values: float | None) -> list[str]:
        return ["–" if value is None else f"{value:.4f}" for value in values]

    def tied(value: MeanValue) -> str:
        return f"{value.worst:.4f} to {value.best:.4f}"

    for score, first, second in zip(report.scores, *shown["metrics"][:2], strict=True):
        ap, precision, more = score.mean_average_precision, score.precision, (score.recall, score.ndcg, score.acg)
        columns = [str(score.n), *four(ap.expected, (ap.high - ap.low) / 2), tied(ap), "0.5000", f"{score.tied:.1%}"]
        assert list(first.values()) == [*columns, *four(ap.macro)]
        columns = [str(score.n), *four(precision.expected), tied(precision)]
        assert list(second.values()) == [*columns, *four(*(value.expected for value in (*more, score.wap)))]
    assert [list(row.values()) for row in shown["rankings"][0]] == [
        ["hamming", "20", "0.5000", "+0.0000", "0.4000"],
        ["float", "20", "0.2500", "-0.2500", "0.3000"],
    ]
    ap, place = report.main.mean_average_precision, "a.safetensors, first 8 of 12 bits"
    columns = ["dpsh", place, "abcdef" * 2, "8", *four(ap.expected), f"{ap.low:.4f} to {ap.high:.4f}", tied(ap)]
    assert [list(row.values()) for row in shown["models"][0]] == [[*columns, "0.5000"]]
    for row, radius in zip(shown["lookup"][0], (0, 1, 2, 3, 4, 6, 8), strict=True):
        curves, within = report.curves, report.calibration.within_radius[radius]
        before = four(*(each[radius] for each in (curves.precision_zero, curves.precision_skip, curves.radius_recall)))
        assert list(row.values()) == [str(radius), *before, f"{curves.empty[radius]:.1%}", *four(within)]
    bits, distances = report.bits, report.distances
    assert [row[""] for row in shown["lookup"][1]] == [
        f"{bits.n_distinct} of 40",
        str(bits.most_common),
        f"{min(bits.balance):.2f} to {max(bits.balance):.2f}",
        str(bits.n_constant),
        f"{bits.mean_correlation:.3f} on average, at most {bits.max_correlation:.3f}",
        *four(bits.quantisation_error, bits.quantisation_angle),
        f"{distances.intra:.4f} bits",
        f"{distances.inter:.4f} bits",
    ]
    ordered = [*sorted(report.labels[:-1], key=lambda label: -label.mean_average_precision), report.labels[-1]]
    for row, label in zip(shown["labels"][0], ordered, strict=True):
        columns = [label.name, str(label.queries), str(label.database)]
        assert list(row.values()) == [*columns, *four(label.mean_average_precision, label.precision)]
    for row, pair in zip(shown["labels"][1], report.confusions, strict=True):
        assert list(row.values()) == [pair.asked, pair.returned, f"{pair.share:.1%}", f"{pair.lift:.1f}"]
    for row, query in zip(shown["worst"][0], report.worst, strict=True):
        assert list(row.values()) == [query.name, ", ".join(query.labels), *four(query.average_precision)]


def test_json_round_trip_and_what_is_not_a_report(folder, report, tmp_path):
    path = folder / "report.json"
    assert load_report(path) == report
    stored = json.loads(path.read_text())
    assert "NaN" not in path.read_text()
    assert stored["labels"][-1]["mean_average_precision"] is None  # no query has this label
    other = tmp_path / "report.json"
    for content in (
        json.dumps(stored | {"schema_version": 99}).encode(),
        json.dumps({"schema_version": 2}).encode(),
        json.dumps(stored | {"n_bits": "many"}).encode(),
        b"[]",
        b"\xff\xfe",
    ):
        other.write_bytes(content)
        with pytest.raises(BadConfig):
            load_report(other)
    with pytest.raises(BadConfig):
        load_report(tmp_path / "none.json")


def test_scores_carry_intervals_bounds_and_the_share_of_ties(report, parts, measured):
    for score in report.scores:
        for value in (score.mean_average_precision, score.precision, score.ndcg, score.acg, score.wap, score.recall):
            assert value.worst <= value.expected <= value.best
            assert value.low < value.expected < value.high
        assert 0 <= score.tied <= 1
        assert score.as_served == 0.5
        assert score.ndcg.expected == pytest.approx(measured.per_query[f"nDCG@{score.n}"].expected.mean())
    query, database = parts
    d = hamming.distances(pack(query.vectors), pack(database.vectors))
    relevant = query.labels.astype(int) @ database.labels.T > 0
    assert report.distances.relevant == [int(((d == r) & relevant).sum()) for r in range(N_BITS + 1)]
    assert report.distances.irrelevant == [int(((d == r) & ~relevant).sum()) for r in range(N_BITS + 1)]
    assert report.distances.intra == pytest.approx(d[relevant].mean())
    assert report.distances.inter == pytest.approx(d[~relevant].mean())
    assert [row.database for row in report.labels] == database.labels.sum(axis=0).tolist()
    curves = report.curves
    assert (curves.ns[:20], curves.ns[-1]) == ([*range(1, 21)], 40)
    assert curves.recall[-1] == pytest.approx(relevant.any(axis=1).mean())
    for score in report.scores:
        at, mean = curves.ns.index(score.n), score.precision
        found = [curves.precision_worst[at], curves.precision[at], curves.precision_best[at], curves.recall[at]]
        assert found == pytest.approx([mean.worst, mean.expected, mean.best, score.recall.expected])
        cut = np.sort(d, axis=1)[:, score.n - 1 : score.n]
        before, upto = (d < cut).sum(axis=1), (d <= cut).sum(axis=1)
        assert score.tied == pytest.approx(np.where(upto > score.n, 1 - before / score.n, 0).mean())
    for r in range(N_BITS + 1):
        n_within, hits = (d <= r).sum(axis=1), ((d <= r) & relevant).sum(axis=1)
        some = n_within > 0
        assert curves.empty[r] == pytest.approx(1 - some.mean())
        assert curves.precision_zero[r] == pytest.approx((hits / np.maximum(n_within, 1)).mean())
        skipped = (hits[some] / n_within[some]).mean() if some.any() else None
        assert curves.precision_skip[r] == (None if skipped is None else pytest.approx(skipped))
        assert curves.radius_recall[r] == pytest.approx((hits / np.maximum(relevant.sum(axis=1), 1)).mean())


def test_every_column_is_the_mean_of_its_metric():
    rng = np.random.default_rng(0)
    queries, database = (rng.integers(0, 2, (n, 4)).astype(np.uint8) for n in (6, 40))
    queries[:, 3] |= ~queries.any(axis=1)
    # Database item i is at distance i of every query, so there are no ties.
    codes = pack(np.zeros((6, 40), np.float32)), pack(np.tri(40, 40, -1, np.float32))
    found = histograms(*codes, queries, database, n_bits=40, graded=True)
    ranking = Ranking(*hamming.search(*codes, 40), [np.arange(6.0), np.arange(6.0) + 1])
    measured = measure_histograms(found, ranking, queries, ns=NS, normalizer="relevant", seed=3)

    shared = queries.astype(int) @ database.T
    n_relevant = (shared > 0).sum(axis=1)
    rank = np.arange(1, 41)

    def dcg(gains):
        return ((2.0**gains - 1) / np.log2(rank + 1)).cumsum(axis=1)

    at_rank = {
        "mean_average_precision": ((shared > 0) * (shared > 0).cumsum(axis=1) / rank).cumsum(axis=1).T / n_relevant,
        "precision": ((shared > 0).cumsum(axis=1) / rank).T,
        "recall": (shared > 0).cumsum(axis=1).T / n_relevant,
        "ndcg": (dcg(shared) / dcg(-np.sort(-shared, axis=1))).T,
        "acg": (shared.cumsum(axis=1) / rank).T,
        "wap": ((shared > 0) * shared.cumsum(axis=1) / rank).cumsum(axis=1).T / n_relevant,
    }
    for score, n, as_served in zip(measured.scores, NS, (2.5, 3.5), strict=True):
        assert (score.n, score.tied, score.as_served) == (n, 0, as_served)
        for name, values in at_rank.items():
            mean = getattr(score, name)
            assert [mean.worst, mean.expected, mean.best] == pytest.approx([values[n - 1].mean()] * 3), name
            of_labels = [values[n - 1][queries[:, label] == 1].mean() for label in range(4)]
            assert mean.macro == pytest.approx(np.mean(of_labels))
            interval = bootstrap(values[n - 1], seed=3)
            assert (mean.low, mean.high) == pytest.approx((interval.low, interval.high))
    for label, row in enumerate(label_scores(measured, queries, database, NAMES[:4])):
        has, of_rank = queries[:, label] == 1, measured.main_n - 1
        assert (row.name, row.queries, row.database) == (NAMES[label], has.sum(), database[:, label].sum())
        assert row.mean_average_precision == pytest.approx(at_rank["mean_average_precision"][of_rank][has].mean())
        assert row.precision == pytest.approx(at_rank["precision"][of_rank][has].mean())


@pytest.mark.parametrize(
    ("ns", "n_database", "main_n"),
    [
        ((10, 20, 50, 100, 1000), 20_000, 1000),
        ((10, 20, 50, 100, 1000), 1500, 100),
        ((10, 50, 100, 1000, 1500), 2000, 1000),
        ((10, 100, 150), 150, 100),
        ((10, 50, 100, 150), 150, 50),
        ((10, 100, 500, 5000), 60_000, 500),
        ((100, 2000, 3000), 20_000, 2000),
        ((10, 60), 60, 10),
        ((5, 20, 40), 40, 20),
        ((60,), 60, 60),
    ],
)
def test_the_headline_is_at_the_usual_n_or_at_the_middle_one(ns, n_database, main_n, report, measured):
    scores = [type(report.main)(**{**vars(report.main), "n": n}) for n in ns]
    fields = {**vars(measured), "scores": scores, "n_database": n_database}
    assert Measurements(**fields).main_n == main_n


def test_confused_labels_are_those_of_irrelevant_hits(parts):
    query, database = parts
    ids = hamming.search(pack(query.vectors), pack(database.vectors), 10)[1]
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
        assert pair.lift == pytest.approx(pair.share / (chance_of[place] / chance_of.sum()), rel=1e-5)
    assert confusions(np.ones_like(query.labels), np.ones_like(database.labels), NAMES, ids) == []


def test_worst_queries_leave_out_those_for_which_nothing_is_relevant():
    assert worst_queries(np.array([0.0, 0.5, 0.1, 0.1]), np.array([0, 3, 1, 3])) == [2, 3, 1]
    assert random_queries(3, seed=0) == [0, 1, 2]
    assert random_queries(100, seed=1) == random_queries(100, seed=1) != random_queries(100, seed=2)


def test_points_have_the_colour_of_their_rarest_frequent_label(parts):
    labels = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], np.uint8)
    group, names = group_by_label(labels, ("a", "b", "c"))
    assert names == ["a", "b", "c"]
    assert group.tolist() == [1, 0, 2, -1]
    assert len(group_by_label(np.eye(9, dtype=np.uint8), NAMES[:1] * 9)[1]) == len(SERIES)
    assert projected(parts[1], 5) == {}  # too few images
    alike = np.abs(parts[1].vectors) * np.float32([1, -1] * 5)  # one code
    assert project(alike, parts[1].labels, NAMES, n_points=30, seed=0).keys() == {"outputs"}
    assert project(np.sign(alike), parts[1].labels, NAMES, n_points=30, seed=0) == {}  # t-SNE would crash
    np.testing.assert_array_equal(*(projected(parts[1], 30)["codes"][0] for _ in range(2)))


def test_markdown_has_the_headline_and_escapes_what_would_break_a_table(report):
    text = as_markdown(report)
    assert f"| 20 | **{report.main.mean_average_precision.expected:.4f}** |" in text
    assert "| a\\|b |" in text
    assert "**Something else**" in text
    for section in summary(report).split("\n## "):
        assert section.strip() in text


def test_the_citation_has_a_table_for_latex_and_an_entry_for_each_source(folder, report):
    tex, bib = ((folder / name).read_text() for name in ("report.tex", "report.bib"))
    page, markdown = html.unescape((folder / "report.html").read_text()), (folder / "report.md").read_text()
    assert all(text.strip() in where for text in (tex, bib) for where in (page, markdown))
    found = report.main.mean_average_precision
    assert f"{found.expected:.4f} $\\pm$ {(found.high - found.low) / 2:.4f}" in tex
    assert tex.count("{") == tex.count("}")
    held_out = replace(report, held_out=["a_b"], labels_used="held-out")
    assert "a_b" in cited(held_out)
    assert "a\\_b" in as_latex(held_out)
    cff = (ROOT / "CITATION.cff").read_text()
    for field in ("title", "author"):
        value = re.search(rf"{field} = {{{{(.+)}}}},", bib)[1]
        assert f'"{value}"' in cff
    sources = {
        "hyp2": "Xu et al., HyP2 Loss: Beyond, and more, ACM MM 2022",
        "tie_aware": "Hashseek's own; He et al., Hashing & Ranking, CVPR 2018",
        "msc": "Audibert et al., ECML-PKDD 2024; Li and van Gemert, A Study, arXiv 2412.00101",
        "bce": "a textbook loss",
    }
    assert parsed(sources) == {
        "hyp2": {
            "author": "Xu and others",
            "title": "{HyP2 Loss: Beyond, and more}",
            "howpublished": "ACM MM",
            "year": "2022",
        },
        "tie_aware-2": {
            "author": "He and others",
            "title": "{Hashing \\& Ranking}",
            "howpublished": "CVPR",
            "year": "2018",
        },
        "msc": {"note": "Audibert et al., ECML-PKDD 2024"},
        "msc-2": {"author": "Li and van Gemert", "title": "{A Study}", "howpublished": "arXiv 2412.00101"},
    }


@pytest.mark.parametrize("name", [*LOSSES, *SOURCES])
def test_every_loss_and_published_data_set_has_a_reference(name):
    source = SOURCES[name] if name in SOURCES else loss_class(name).source
    assert parsed({name: source}) or name == "bce"


def test_heavy_libraries_are_loaded_only_when_they_are_needed():
    program = (
        "import sys, hashseek.training.cli.evaluate, hashseek.training.cli.compare\n"
        "import hashseek.training.cli.probe, hashseek.training.cli.truncate\n"
        "early = [name for name in ('torch', 'sklearn') if name in sys.modules]\n"
        "import hashseek.training.evaluation.report.folder, hashseek.training.evaluation.report.projection\n"
        "print(early, [name for name in ('matplotlib', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def test_a_name_that_is_not_utf_8_does_not_lose_the_report(report, tmp_path):
    Evaluation(replace(report, command="hashseek evaluate caf\udce9"), {"query": ["caf\udce9.png"]}, {}).write(tmp_path)
    assert load_report(tmp_path / "report.json").command == "hashseek evaluate caf?"
    assert "hashseek evaluate caf?" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "per_query.csv").read_bytes().splitlines()[1] == b"caf\xe9.png"
