"""The report as a single HTML page: style, plots and pictures are inside it, and it needs no script."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import ImageOps

from hashseek.retrieval.errors import BadImage
from hashseek.retrieval.images import decode, read_bytes
from hashseek.training.evaluation.report.plots import PLOTS
from hashseek.training.evaluation.report.schema import EvaluationReport, ExampleHit
from hashseek.training.evaluation.report.sections import half_width, number, sections, tie_range
from hashseek.training.report_format import render_page

_SIDES = {"query": 300, "hit": 170}  # pixels: twice what the page shows on a wide screen
GOOD = 0.75  # share of the query's labels


def as_html(
    report: EvaluationReport,
    svgs: Mapping[str, str],
    *,
    query_paths: Sequence[Path],
    database_paths: Sequence[Path],
) -> str:
    """The page.

    Args:
        report: its values.
        svgs: its plots by name.
        query_paths, database_paths: the images, to show them; empty for a data set without images.
    """
    plots = [(plot, svgs[name]) for name, plot in PLOTS.items() if name in svgs]
    pictures = {"examples": report.examples, "worst": report.worst}
    shown = [
        part
        for part in sections(report)
        if part.tables or part.items or pictures.get(part.id) or any(plot.section == part.id for plot, _ in plots)
    ]

    def thumbnail(kind: str, row: int, name: str) -> dict[str, str]:
        paths = query_paths if kind == "query" else database_paths
        return _thumbnail(paths[row], name, side=_SIDES[kind]) if paths else {"missing": name}

    main = report.main
    before = report.at_main_n(report.baseline) if report.baseline else None
    cards = {"mAP": "mean_average_precision", "precision": "precision", "nDCG": "ndcg", "recall": "recall"}
    return render_page(
        "evaluation.html",
        title=report.title,
        report=report,
        sections=shown,
        plots=plots,
        pictures=pictures,
        cards={
            f"{name}@{main.n}": (getattr(main, field), before and getattr(before, field))
            for name, field in cards.items()
        },
        number=number,
        half_width=half_width,
        tie_range=tie_range,
        thumbnail=thumbnail,
        frame=frame,
    )


def frame(hit: ExampleHit) -> str:
    """The kind of frame around a hit: "good", "some" (the more labels it shares, the greener), or "bad"."""
    return "good" if hit.share >= GOOD else "some" if hit.share else "bad"


def _thumbnail(path: Path, name: str, *, side: int) -> dict[str, str]:
    """`src`: the image as a square, inside the page; or `missing`: why there is none."""
    try:
        image = decode(read_bytes(path), name=name, at_least=side).image
    except BadImage as error:
        return {"missing": str(error)}
    buffer = io.BytesIO()
    ImageOps.fit(image, (side, side)).save(buffer, "JPEG", quality=80, optimize=True)
    return {"src": f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"}
