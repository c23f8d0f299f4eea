"""One page about a run: what came out, with which settings, data and versions, and how it went.

Everything is read from the run's folder, so the page says what the folder holds. Written as Markdown beside its curves,
and as HTML in one file.
"""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from hashseek.retrieval.files import write_atomically
from hashseek.training.config import Config, parse_config
from hashseek.training.runs.curves import Panel, Series, draw
from hashseek.training.runs.run_folder import Run

Rows = list[tuple[str, str]]


def write_report(run: Run, records: Sequence[dict[str, Any]]) -> None:
    """Write report.md, curves.svg and report.html for the epochs in `records` (at least one)."""
    config = parse_config(json.loads(run.config.read_text(encoding="utf-8")), source=str(run.config))
    title = f"Run {run.folder.resolve().name}"
    tables = {
        "Result": _result(run, config, records),
        "Settings": _settings(config),
        "Data": _data(run),
        "Computed with": _computed_with(run),
    }
    curves = draw(panels(records))
    write_atomically(run.curves, curves.encode())
    write_atomically(run.report, _as_markdown(title, tables, run.curves.name).encode())
    write_atomically(run.report.with_suffix(".html"), _as_html(title, tables, curves).encode())


def panels(records: Sequence[dict[str, Any]]) -> list[Panel]:
    """Loss terms, learning rate, validation score with its best epoch, and throughput, over epochs from 1."""
    epochs = [record["epoch"] + 1 for record in records]

    def column(key: str) -> list[float]:
        return [float(record.get(key, "nan")) for record in records]

    terms = list(dict.fromkeys(key for record in records for key in record if key.startswith("loss_")))
    score = next(key for key in records[0] if key.startswith("val_"))
    best = max(range(len(records)), key=lambda i: (records[i][score], -i))
    name = f"Validation {score.removeprefix('val_')}"
    losses = [Series(term.removeprefix("loss_"), epochs, column(term)) for term in terms]
    if len(terms) > 1:
        losses.append(Series("sum", epochs, column("loss")))
    value = column(score)[best]
    return [
        Panel("Loss" if len(terms) > 1 else f"Loss: {losses[0].name}", losses, whole_x=True),
        Panel(
            name, [Series(name, epochs, column(score))], whole_x=True, mark=(epochs[best], value, f"best: {value:.4f}")
        ),
        Panel("Learning rate", [Series("lr", epochs, column("lr"))], whole_x=True),
        Panel(
            "Throughput, images/s", [Series("images/s", epochs, column("images_per_s"))], whole_x=True, from_zero=True
        ),
    ]


def _result(run: Run, config: Config, records: Sequence[dict[str, Any]]) -> Rows:
    score = next(key for key in records[0] if key.startswith("val_"))
    best = max(records, key=lambda record: (record[score], -record["epoch"]))
    last = records[-1]
    seconds = sum(record["seconds"] for record in records)
    speeds = sorted(record["images_per_s"] for record in records)
    name = f"validation {score.removeprefix('val_')}"
    return [
        (f"best {name}", f"{best[score]:.4f}, epoch {best['epoch'] + 1} ({run.best.name})"),
        (f"last {name}", f"{last[score]:.4f}, epoch {last['epoch'] + 1}"),
        ("epochs", f"{len(records)} of {config.train.epochs}"),
        ("time", f"{_duration(seconds)} in epochs, {speeds[len(speeds) // 2]:,.0f} images/s (median)"),
    ]


def _settings(config: Config) -> Rows:
    """What is not at its default."""
    sections = config.model_dump(mode="json", exclude_defaults=True, exclude={"data"})
    rows: Rows = [("loss.name", config.loss.name)] if "name" not in sections.get("loss", {}) else []
    for section, values in sections.items():
        rows += [(f"{section}.{key}", _text(value)) for key, value in values.items()]
    return rows


def _data(run: Run) -> Rows:
    if not run.splits.is_file():
        return []
    splits = json.loads(run.splits.read_text(encoding="utf-8"))
    names = splits["label_names"]
    return [
        *((f"data.{key}", _text(value)) for key, value in splits["data"].items()),
        ("images", ", ".join(f"{name} {count:,}" for name, count in splits["sizes"].items())),
        (
            "of train",
            f"{splits['of_train']['learnt_from']:,} to learn, {splits['of_train']['validated_on']:,} to validate",
        ),
        (f"{len(names)} labels", ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")),
        ("splits SHA-256", splits["splits_sha256"]),
    ]


def _computed_with(run: Run) -> Rows:
    if not run.environment.is_file():
        return []
    rows: Rows = []
    for start in json.loads(run.environment.read_text(encoding="utf-8")):
        git = start["git"]
        state = "no checkout" if git is None else git["commit"][:12] + (" and changes" if git["dirty"] else "")
        versions = ", ".join(
            f"{name} {start[name]}" for name in ("python", "torch", "torchvision", "numpy") if name in start
        )
        rows.append((f"from epoch {start['first_epoch'] + 1}", f"{start['started']}, {start['command']}"))
        rows.append(
            ("", f"{versions}; {start['device']}, {start['cores']} cores, {start['devices']} process(es); git: {state}")
        )
    return rows


def _as_markdown(title: str, tables: dict[str, Rows], curves: str) -> str:
    lines = [f"# {title}", ""]
    for i, (heading, rows) in enumerate(tables.items()):
        if not rows:
            continue
        lines += [f"## {heading}", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {_cell(value)} |" for name, value in rows]
        lines.append("")
        if i == 0:
            lines += [f"![Loss, validation score, learning rate and throughput]({curves})", ""]
    return "\n".join(lines)


def _as_html(title: str, tables: dict[str, Rows], curves: str) -> str:
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>",
        "body{font:15px/1.45 sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:#222}",
        "table{border-collapse:collapse;width:100%}td{border-top:1px solid #ddd;padding:.25em .6em;vertical-align:top;"
        "overflow-wrap:anywhere}td:first-child{width:12em;color:#666}svg{max-width:100%;height:auto}h2{font-size:1.1em}",
        f"</style></head><body><h1>{escape(title)}</h1>",
    ]
    for i, (heading, rows) in enumerate(tables.items()):
        if not rows:
            continue
        cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
        parts.append(f"<h2>{escape(heading)}</h2><table>{cells}</table>")
        if i == 0:
            parts.append(curves)
    return "\n".join([*parts, "</body></html>", ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
