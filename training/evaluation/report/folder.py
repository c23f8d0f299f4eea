"""The folder of a report: JSON for machines, Markdown and a page for people, a table per query, figures as files."""

import csv
import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashseek.retrieval.files import write_atomically
from hashseek.retrieval.metrics import Figure
from hashseek.training.evaluation.report.markdown import as_markdown
from hashseek.training.evaluation.report.schema import Report

Points = Mapping[str, tuple[NDArray[np.float64], NDArray[np.int64], Sequence[str]]]


def write_report(
    folder: Path,
    report: Report,
    *,
    per_query: Mapping[str, Sequence[Any]],
    points: Points | None = None,
    query_paths: Sequence[Path] = (),
    database_paths: Sequence[Path] = (),
) -> list[Path]:
    """Write everything; gives the files, the page first.

    Args:
        folder: made where it is missing; files of an earlier report are replaced.
        report: its values. per_query: columns of equal length. points: from `project`.
        query_paths, database_paths: of the images; empty where there are none.

    Raises:
        OSError: the folder cannot be written.
    """
    from hashseek.training.evaluation.report.figures import as_png, as_svg, draw_all  # late: it loads matplotlib
    from hashseek.training.evaluation.report.page import as_html

    drawn = draw_all(report, points or {})
    svgs = {name: as_svg(figure, name) for name, figure in drawn.items()}
    page = as_html(report, svgs, query_paths=query_paths, database_paths=database_paths)
    contents = {
        "report.html": page.encode(),
        "report.md": as_markdown(report).encode(),
        "report.json": report.as_json().encode(),
        "per_query.csv": as_csv(per_query),
    }
    if find_spec("pyarrow") is not None:
        contents["per_query.parquet"] = as_parquet(per_query)
    for name, figure in drawn.items():
        contents[f"figures/{name}.svg"] = svgs[name].encode()
        contents[f"figures/{name}.png"] = as_png(figure)
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]


def query_columns(
    names: Sequence[str],
    labels: Sequence[Sequence[str]],
    n_relevant: NDArray[np.int64],
    nearest: NDArray[np.integer],
    figures: Mapping[str, Figure],
    served: Mapping[str, NDArray[np.float64]],
) -> dict[str, list[Any]]:
    """The table per query: what it is, and each figure with its bounds."""
    columns: dict[str, list[Any]] = {
        "query": list(names),
        "labels": [";".join(row) for row in labels],
        "relevant_in_database": n_relevant.tolist(),
        "nearest_distance": nearest.tolist(),
    }
    for name, figure in figures.items():
        columns[name] = figure.expected.tolist()
        columns[f"{name}_worst"] = figure.worst.tolist()
        columns[f"{name}_best"] = figure.best.tolist()
        if name in served:
            columns[f"{name}_as_served"] = served[name].tolist()
    return columns


def as_csv(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """Columns as CSV; numbers with as many digits as they have."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return buffer.getvalue().encode("utf-8", errors="surrogateescape")


def as_parquet(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """Columns as Parquet."""
    import pyarrow
    import pyarrow.parquet

    readable = {name: [_readable(value) for value in values] for name, values in columns.items()}
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(readable), sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _readable(value: Any) -> Any:
    """A file name that is not UTF-8 keeps its bytes as escapes: Parquet holds nothing else."""
    return value.encode("utf-8", errors="backslashreplace").decode() if isinstance(value, str) else value
