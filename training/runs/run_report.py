"""The report of a training run: result, curves, settings, data and versions, as Markdown and as one HTML page.

`tracking` writes the report during the run and at its end.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from statistics import median
from typing import Any

from hashseek.retrieval.files import write_atomically
from hashseek.training.config import Config
from hashseek.training.plotting import INK, SERIES, as_svg, style
from hashseek.training.report_format import Table, render_page, table_as_markdown
from hashseek.training.runs.run_folder import Run

Rows = list[tuple[str, str]]


def write_report(run: Run, config: Config, records: Sequence[dict[str, Any]]) -> None:
    """Write report.md, curves.svg and report.html for the epochs in `records` (at least one)."""
    title = f"Training run: {run.folder.resolve().name}"
    rows = {
        "Result": _result(run, config, records),
        "Settings": _settings(config),
        "Data": _data(run),
        "Computed with": _computed_with(run),
    }
    tables = {name: Table(("", ""), found, text_columns=2) for name, found in rows.items()}
    curves = curves_of(records)
    markdown = [f"# {title}"]
    for name, table in tables.items():
        markdown += [f"## {name}", table_as_markdown(table)]
        if name == "Result":
            markdown.append(f"![Loss, validation score, learning rate and throughput]({run.curves.name})")
    page = render_page("run.html", title=title, tables=tables, curves=curves)
    write_atomically(run.curves, curves.encode())
    # A folder in a command or a setting may have a name that is not UTF-8.
    write_atomically(run.report, ("\n\n".join(markdown) + "\n").encode(errors="replace"))
    write_atomically(run.report.with_suffix(".html"), page.encode(errors="replace"))


def curves_of(records: Sequence[dict[str, Any]]) -> str:
    """Loss terms, validation score with its best epoch, learning rate and throughput by epoch, as one SVG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    epochs = [record["epoch"] for record in records]
    terms = list(dict.fromkeys(key for record in records for key in record if key.startswith("loss_")))
    panels = {  # title -> the lines in it, name -> key of the records
        "Loss" if len(terms) > 1 else f"Loss: {terms[0].removeprefix('loss_')}": {
            **{term.removeprefix("loss_"): term for term in terms},
            **({"sum": "loss"} if len(terms) > 1 else {}),
        },
        **{f"Validation {score.removeprefix('val_')}": {score: score} for score, _ in _best(records)},
        "Learning rate": {"lr": "lr"},
        "Throughput, images/s": {"images/s": "images_per_s"},
    }
    with style():
        figure = Figure(figsize=(10, 6))
        # With a computed layout, the plot takes nearly twice as long.
        figure.subplots_adjust(0.08, 0.08, 0.98, 0.95, wspace=0.2, hspace=0.4)
        for place, (title, lines) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(2, 2, place, title=title, xlabel="epoch")
            for number, (name, key) in enumerate(lines.items()):
                values = [float(record.get(key, "nan")) for record in records]
                axes.plot(epochs, values, "o" * (len(epochs) == 1), color=SERIES[number % len(SERIES)], label=name)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if len(lines) > 1:
                axes.legend()
            for score, best in _best(records):
                if score in lines:
                    x, y = best["epoch"], best[score]
                    axes.plot(x, y, "o", markersize=9, markerfacecolor="none", color=INK)
                    side = "right" if x > sum(axes.get_xlim()) / 2 else "left"
                    axes.annotate(f"best: {y:.4f}", (x, y), (0, -14), textcoords="offset points", ha=side)
        axes.set_ylim(bottom=0)  # of the throughput
        return as_svg(figure, "panels")


def _best(records: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The key of the validation score and the record of the best epoch; nothing for a loss without labels."""
    scores = [key for key in records[0] if key.startswith("val_")]
    return [(score, max(records, key=lambda record: (record[score], -record["epoch"]))) for score in scores]


def _result(run: Run, config: Config, records: Sequence[dict[str, Any]]) -> Rows:
    rows = []
    last = records[-1]
    for score, best in _best(records):
        name = f"validation {score.removeprefix('val_')}"
        rows += [
            (f"best {name}", f"{best[score]:.4f}, epoch {best['epoch']} ({run.best.name})"),
            (f"last {name}", f"{last[score]:.4f}, epoch {last['epoch']}"),
        ]
    seconds = sum(record["seconds"] for record in records)
    time = timedelta(seconds=round(seconds))
    speed = median(record["images_per_s"] for record in records)
    waiting = sum(record["seconds_waiting_for_data"] for record in records) / seconds
    return [
        *rows,
        ("epochs", f"{len(records)} of {config.train.epochs}"),
        ("time", f"{time} in epochs, {speed:,.0f} images/s (median), {waiting:.0%} waiting for data"),
    ]


def _settings(config: Config) -> Rows:
    """The settings that are not at their defaults."""
    sections = config.model_dump(mode="json", exclude_defaults=True, exclude={"data"})
    rows: Rows = [("loss.name", config.loss.name)] if "name" not in sections.get("loss", {}) else []
    for section, values in sections.items():
        rows += [(f"{section}.{key}", _as_text(value)) for key, value in values.items()]
    return rows


def _data(run: Run) -> Rows:
    splits = json.loads(run.splits.read_text(encoding="utf-8"))
    names, train = splits["label_names"], splits["of_train"]
    return [
        *((f"data.{key}", _as_text(value)) for key, value in splits["data"].items()),
        ("images", ", ".join(f"{name} {count:,}" for name, count in splits["sizes"].items())),
        ("train split", f"{train['learnt_from']:,} for training, {train['validated_on']:,} for validation"),
        (f"{len(names)} labels", ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")),
        ("splits SHA-256", splits["splits_sha256"]),
    ]


def _computed_with(run: Run) -> Rows:
    rows: Rows = []
    for start in json.loads(run.environment.read_text(encoding="utf-8")):
        git = start["git"]
        state = "not a checkout" if git is None else git["commit"][:12] + (" with changes" if git["dirty"] else "")
        names = ("python", "torch", "torchvision", "numpy")
        versions = ", ".join(f"{name} {start[name]}" for name in names if name in start)
        machine = f"{start['device']}, cores: {start['cores']}, processes: {start['devices']}"
        engine = start.get("features_computed_in")
        machine += f"; features: {engine}" if engine else ""
        rows.append((f"from epoch {start['first_epoch']}", f"{start['started']}, {start['command']}"))
        rows.append(("", f"{versions}; {machine}; git: {state}"))
    return rows


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
