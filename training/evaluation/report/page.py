"""The report as one HTML file that needs nothing else: style, figures and pictures are in it, and no script."""

import base64
import io
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from PIL import ImageOps

from hashseek.retrieval.errors import BadImage
from hashseek.retrieval.images import decode, read_bytes
from hashseek.training.evaluation.report.markdown import certificate, explanation, name_of, number, protocol_of
from hashseek.training.evaluation.report.schema import Example, Report, Score, Value

# Pixels a side of the pictures: twice what the page shows on a wide screen.
_QUERY_SIDE, _HIT_SIDE = 300, 170
GOOD, BAD = 0.75, 0.25
CAPTIONS = {
    "precision_curve": (
        "Top-N precision",
        "Mean precision among the first N images; the band is what ties leave open.",
    ),
    "precision_recall": (
        "Precision and recall",
        "Over rank down to the whole database, and over the radius of a hash lookup (empty balls left out).",
    ),
    "distances": ("Hamming distances", "Of pairs that share a label and of pairs that share none; dashed: the means."),
    "calibration": (
        "What a distance is worth",
        "How likely an image at a distance is relevant, and the precision to expect of all images within it.",
    ),
    "lengths": (
        "mAP by code length",
        "On the same queries and database, a point for each checkpoint; the band is what ties leave open.",
    ),
    "tsne_codes": (
        "t-SNE of the codes",
        "Database images by Hamming distance. An image of several of these labels has the colour of the rarest.",
    ),
    "tsne_outputs": ("t-SNE of the outputs", "The same images by the angle between the model's real outputs."),
}


CURVES = ("precision_curve", "precision_recall", "distances", "calibration")


def as_html(
    report: Report, svgs: Mapping[str, str], *, query_paths: Sequence[Path] = (), database_paths: Sequence[Path] = ()
) -> str:
    """The page.

    Args:
        report: its values. svgs: its figures by name.
        query_paths, database_paths: of the images, to show them; empty for a data set that has none.
    """
    title = escape(report.title)
    style = files("hashseek.training.evaluation.report").joinpath("page.css").read_text(encoding="utf-8")
    sections = {
        "figures": ("Figures", _figures(report)),
        "curves": ("Curves and distances", _drawings(svgs, [name for name in svgs if name in CURVES])),
        "lengths": (f"mAP@{report.main_n} by code length", _models(report, svgs)),
        "lookup": ("Hash lookup and bits", _lookup(report)),
        "labels": ("Labels", _labels(report)),
        "tsne": ("Map of the database", _drawings(svgs, [name for name in svgs if name.startswith("tsne")])),
        "queries": ("Queries and their nearest images", _queries(report, query_paths, database_paths)),
        "worst": ("Worst queries", _worst(report, query_paths, database_paths)),
        "served": ("Service beside library", _served(report)),
        "protocol": ("Protocol certificate", _protocol(report)),
    }
    shown = {name: part for name, part in sections.items() if part[1]}
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, (heading, _) in shown.items())
    body = "".join(
        f'<section id="{name}"><h2>{heading}</h2>{content}</section>' for name, (heading, content) in shown.items()
    )
    data = report.data
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        f"<title>{title} – Hashseek report</title>\n<style>\n{style}</style></head>\n<body><header><h1>{title}</h1>"
        f'<p class="muted">{data.get("queries")} queries, {data.get("database")} images in the database, '
        f"{report.n_bits}-bit codes · checkpoint {escape(report.fingerprint[:12])} · "
        f"{escape(report.created.replace('T', ' ').replace('+00:00', ' UTC'))}</p>"
        f"<nav>{links}</nav></header>\n<main>{body}</main></body></html>\n"
    )


def _figures(report: Report) -> str:
    main, bounds = report.main, report.ties == "expected"
    parts = (
        (f"mAP@{main.n}", main.mean_average_precision),
        (f"precision@{main.n}", main.precision),
        (f"nDCG@{main.n}", main.ndcg),
        (f"recall@{main.n}", main.recall),
    )
    cards = "".join(_card(name, value, first=not place, bounds=bounds) for place, (name, value) in enumerate(parts))
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    missing = "".join(f"<li>{escape(sentence)}</li>" for sentence in report.missing)
    about = f"<p><b>Not the usual protocol:</b> {escape(protocol_of(report))}.</p>" if report.held_out else ""
    tables = _scores(report.scores, "This checkpoint", bounds=bounds)
    if report.baseline:
        tables += _scores(report.baseline, escape(report.baseline_name), bounds=bounds)
    return (
        f'{about}<div class="cards">{cards}</div><p class="muted">{escape(explanation(report))}</p>{tables}'
        + (f"<h3>Not in this report</h3><ul>{missing}</ul>" if missing else "")
        + (f"<h3>Notes</h3><ul>{notes}</ul>" if notes else "")
    )


def _card(name: str, value: Value, *, first: bool, bounds: bool) -> str:
    half = (value.high - value.low) / 2
    order = f"order of ties: {value.worst:.4f} to {value.best:.4f}<br>" if bounds else ""
    return (
        f'<div class="card{" first" if first else ""}">{name}<b>{value.expected:.4f} <small>± {half:.4f}</small></b>'
        f'<span class="muted">{order}'
        f"mean over labels: {value.macro:.4f}</span></div>"
    )


def _scores(scores: Sequence[Score], caption: str, *, bounds: bool) -> str:
    rows = []
    for score in scores:
        ap = score.mean_average_precision
        rows.append(
            [
                str(score.n),
                f"<b>{ap.expected:.4f}</b> ± {(ap.high - ap.low) / 2:.4f}",
                *([f"{ap.worst:.4f} to {ap.best:.4f}", number(score.as_served)] if bounds else []),
                f"{score.precision.expected:.4f}",
                f"{score.recall.expected:.4f}",
                f"{score.ndcg.expected:.4f}",
                f"{score.acg.expected:.4f}",
                f"{score.wap.expected:.4f}",
                *([f"{score.tied:.1%}"] if bounds else []),
            ]
        )
    ties = ["worst to best", "as served"] if bounds else []
    head = ["N", "mAP@N", *ties, "precision", "recall", "nDCG", "ACG", "WAP", *(["tied at the cut"] if bounds else [])]
    return _table(head, rows, caption=caption)


def _models(report: Report, svgs: Mapping[str, str]) -> str:
    if not report.models:
        return ""
    rows = []
    for model in report.models:
        score = next(score for score in model.scores if score.n == report.main_n)
        ap = score.mean_average_precision
        file = f'<span class="muted">{escape(name_of(model))} · {model.fingerprint[:12]}</span>'
        rows.append(
            [
                f"{escape(model.method)}<br>{file}",
                str(model.n_bits),
                f"<b>{ap.expected:.4f}</b>",
                f"{ap.low:.4f} to {ap.high:.4f}",
                f"{ap.worst:.4f} to {ap.best:.4f}",
                number(score.as_served),
            ]
        )
    head = ["method", "bits", f"mAP@{report.main_n}", "95 % interval", "worst to best", "as served"]
    return _drawings(svgs, ["lengths"], headed=False) + _table(head, rows, text_columns=1)


def _served(report: Report) -> str:
    served = report.served
    if served is None:
        return ""
    rows = [
        [
            str(score.n),
            f"{score.as_served:.6f}",
            f"{served.library[score.n]:.6f}",
            f"{score.as_served - served.library[score.n]:+.6f}",
        ]
        for score in report.scores
        if score.as_served is not None
    ]
    listed = "".join(f"<li>{escape(sentence)}</li>" for sentence in served.differences)
    return (
        f"<p>{escape(served.url)}, hashseek {escape(served.version or 'of unknown version')}, gave {served.equal} of "
        f"{served.equal + len(served.differences)} queries the same ranking as the library: the same ids and distances "
        f"on {served.ranks} ranks.</p>"
        + _table(["N", "mAP@N, service", "mAP@N, library", "difference"], rows)
        + (f"<h3>Differences</h3><ul>{listed}</ul>" if listed else "")
    )


def _drawings(svgs: Mapping[str, str], names: Sequence[str], *, headed: bool = True) -> str:
    figures = []
    for name in names:
        title, caption = CAPTIONS[name]
        svg = svgs[name].replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
        heading = f"<h3>{title}</h3>" if headed else ""
        figures.append(f"<figure>{heading}{svg}<figcaption>{caption}</figcaption></figure>")
    return f'<div class="grid">{"".join(figures)}</div>' if figures else ""


def _lookup(report: Report) -> str:
    curves, bits, distances, calibration = report.curves, report.bits, report.distances, report.calibration
    radii = [radius for radius in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64) if radius < len(curves.empty)]
    rows = [
        [
            str(radius),
            f"{curves.precision_zero[radius]:.4f}",
            number(curves.precision_skip[radius]),
            f"{curves.radius_recall[radius]:.4f}",
            f"{curves.empty[radius]:.1%}",
            number(None if calibration is None else calibration.within_radius[radius]),
        ]
        for radius in radii
    ]
    head = ["radius", "precision (empty: 0)", "precision (empty left out)", "recall", "empty", "precision to expect"]
    facts = []
    if bits is not None:
        facts += [
            ["distinct codes", f"{bits.distinct} of {report.data.get('database')}"],
            ["images on the most common code", str(bits.most_common)],
            ["share of ones per bit", f"{min(bits.balance):.2f} to {max(bits.balance):.2f}"],
            ["bits that never change", str(bits.constant)],
            ["correlation of two bits", f"{bits.mean_correlation:.3f} on average, {bits.max_correlation:.3f} at most"],
            ["quantisation error (|u| − 1)²", number(bits.quantisation_error)],
            ["1 − cosine of outputs and signs", number(bits.quantisation_angle)],
        ]
    if distances is not None:
        facts.append(["d_intra / d_inter", f"{number(distances.intra)} / {number(distances.inter)} bits"])
    parts = [_table(head, rows)] * bool(rows) + [_table(["", ""], facts, text_columns=2)] * bool(facts)
    return f'<div class="grid">{"".join(f"<div>{part}</div>" for part in parts)}</div>' if parts else ""


def _labels(report: Report) -> str:
    n = report.main_n
    ordered = sorted(report.labels, key=lambda row: (-(row.mean_average_precision or -1), row.name))
    rows = [
        [
            escape(row.name),
            str(row.queries),
            str(row.database),
            _bar(row.mean_average_precision),
            number(row.precision),
        ]
        for row in ordered
    ]
    head = ["label", "queries", "database", f"mAP<wbr>@{n}", f"precision<wbr>@{n}"]
    tables = _table(head, rows, text_columns=1, caption="Queries that carry the label")
    confused = ""
    if report.confusions:
        pairs = [
            [escape(pair.asked), escape(pair.returned), f"{pair.share:.1%}", f"{pair.lift:.1f}"]
            for pair in report.confusions
        ]
        head = ["asked for", "found", "share of irrelevant hits", "times chance"]
        confused = f"<div>{_table(head, pairs, text_columns=2, caption='Labels taken for each other')}</div>"
    return f'<div class="grid"><div>{tables}</div>{confused}</div>'


def _queries(report: Report, query_paths: Sequence[Path], database_paths: Sequence[Path]) -> str:
    if not report.examples:
        return ""
    return (
        f"<p>Drawn at random (seed {report.seed}), ten nearest images each in the order of search. "
        '<span class="key good"></span> at least 75 % of the query’s labels are shared, '
        '<span class="key"></span> some, <span class="key bad"></span> at most 25 %. '
        "Beneath: Hamming distance in bits, and the labels that match.</p>"
        + _sheets(report, report.examples, query_paths, database_paths)
    )


def _worst(report: Report, query_paths: Sequence[Path], database_paths: Sequence[Path]) -> str:
    if not report.worst:
        return ""
    return (
        f"<p>The least AP@{report.main_n} of all queries for which the database holds something relevant.</p>"
        + _sheets(report, report.worst, query_paths, database_paths)
    )


def _sheets(
    report: Report, examples: Sequence[Example], query_paths: Sequence[Path], database_paths: Sequence[Path]
) -> str:
    draw = partial(_sheet, query_paths=query_paths, database_paths=database_paths, n=report.main_n)
    return "".join(draw(example) for example in examples)


def _sheet(example: Example, *, query_paths: Sequence[Path], database_paths: Sequence[Path], n: int) -> str:
    hits = []
    for hit in example.hits:
        kind = "good" if hit.share >= GOOD else "bad" if hit.share <= BAD else "some"
        labels = escape(", ".join(hit.labels) or "no label")
        hits.append(
            f'<li class="{kind}" title="{escape(hit.name)}: {labels}">'
            f"{_picture(database_paths, hit.row, hit.name, side=_HIT_SIDE)}"
            f"<b>{hit.distance} bit{'' if hit.distance == 1 else 's'}</b>"
            f"{escape(', '.join(hit.matched) or 'nothing shared')}</li>"
        )
    return (
        f'<figure class="query"><div>{_picture(query_paths, example.row, example.name, side=_QUERY_SIDE)}'
        f"<b>{escape(', '.join(example.labels) or 'no label')}</b>"
        f'<span class="muted">{escape(example.name)}<br>AP@{n} {example.average_precision:.4f}</span></div>'
        f'<ol class="hits">{"".join(hits)}</ol></figure>'
    )


def _picture(paths: Sequence[Path], row: int, name: str, *, side: int) -> str:
    """The image as a square within the page; where there is none, its name."""
    if not paths:
        return f'<span class="none">{escape(name)}</span>'
    try:
        image = decode(read_bytes(paths[row]), name=name, at_least=side).image
    except BadImage as error:
        return f'<span class="none">{escape(str(error))}</span>'
    buffer = io.BytesIO()
    ImageOps.fit(image, (side, side)).save(buffer, "JPEG", quality=80, optimize=True)
    content = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="{escape(name)}" src="data:image/jpeg;base64,{content}">'


def _protocol(report: Report) -> str:
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td>{_text(value)}</td></tr>" for key, value in certificate(report).items()
    )
    return (
        "<p>Figures of two reports may be compared where splits, labels, normaliser, ties and N agree.</p>"
        f'<div class="scroll"><table class="wide certificate">{rows}</table></div>'
    )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "<br>".join(f"{escape(str(key).replace('_', ' '))} {_text(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.4f}"
    text = str(value)
    if text.startswith("`"):
        return f"<code>{escape(text.strip('`'))}</code>"
    return escape(text)


def _bar(value: float | None) -> str:
    if value is None:
        return number(value)
    return f'<span class="bar" style="background-size:{value:.1%} 100%"></span>{value:.4f}'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "", text_columns: int = 0) -> str:
    """A table of cells that are HTML already; columns after the first `text_columns` are numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if place >= text_columns else ''}>{cell}</{tag}>" for place, cell in enumerate(cells)
        )

    top = f"<thead><tr>{line(head, 'th')}</tr></thead>" if any(head) else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    title = f"<caption>{caption}</caption>" if caption else ""
    return f'<div class="scroll"><table>{title}{top}<tbody>{body}</tbody></table></div>'
