"""Subcommand `losses`."""

import shutil
import textwrap
from typing import Annotated, Any

import typer

from hashseek.retrieval.errors import BadConfig
from hashseek.training.losses import CLASSIFICATION
from hashseek.training.losses.catalogue import ENTRIES, KINDS, Facts, Hyperparameter, Numbers, facts
from hashseek.training.losses.hashing.quantization import QUANTIZERS


def losses(
    name: Annotated[str | None, typer.Argument(help="Show this one in full.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The tables of docs/reference/losses.md.")] = False,
) -> None:
    """List the losses, or show one: source, formula, what it needs, hyperparameters with defaults and ranges."""
    if markdown:
        if name is not None:
            raise BadConfig(f"--markdown writes the tables of all losses: leave {name!r} or --markdown out")
        typer.echo(as_markdown(), nl=False)
        return
    width = max(40, min(shutil.get_terminal_size().columns, 110))
    typer.echo(listing(width) if name is None else in_full(name, width))


def listing(width: int) -> str:
    """Every loss in a few lines, `width` columns wide."""
    indent = 2 + max(map(len, ENTRIES)) + 2
    lines = []
    for kind in KINDS:
        lines += ["", kind.capitalize(), ""]
        for loss in _of(kind):
            entry = ENTRIES[loss.name]
            told = [
                _sentence(entry.use),
                f"{entry.paper}: {entry.formula}.",
                f"Needs: {', '.join(loss.needs) or 'nothing'}.",
                f"{'; '.join(map(_setting, loss.hyperparameters)) or 'No hyperparameters'}.",
            ]
            body = [line for text in told for line in _wrapped(text, width, indent)]
            lines += [f"  {loss.name:<{indent - 2}}{body[0].lstrip()}", *body[1:]]
    lines += ["", *_wrapped("`hashseek losses NAME` shows one in full. " + _OF_ALL, width, 0)]
    return "\n".join(lines[1:])


def in_full(name: str, width: int) -> str:
    """One loss with its formula and the meaning of every hyperparameter.

    Raises:
        BadConfig: there is no such loss.
    """
    loss = facts(name)
    entry = ENTRIES[name]
    fixed = ", ".join(f"{key} = {_value(value)}" for key, value in loss.fixed.items())
    lines = [f"{name}: {loss.method.__name__} with {fixed}" if fixed else name, "", loss.text, ""]
    for title, text in (
        ("use", entry.use),
        ("paper", entry.paper),
        ("formula", entry.formula),
        ("needs", ", ".join(loss.needs) or "nothing beside outputs and labels"),
        ("terms", ", ".join(loss.terms)),
    ):
        lines += _wrapped(f"{title:<9}{text}", width, 0, hanging=9)
    lines += ["", "Hyperparameters:" if loss.hyperparameters else "It has no hyperparameters."]
    for hyper in loss.hyperparameters:
        lines.append(f"  {_setting(hyper)}")
        lines += _wrapped(hyper.meaning, width, 6)
    lines += ["", *_wrapped(_OF_LOGITS if name in CLASSIFICATION else _OF_OUTPUTS, width, 0)]
    return "\n".join(lines)


def as_markdown() -> str:
    """The tables of docs/reference/losses.md."""
    lines = []
    for kind in KINDS:
        lines += [
            f"### {kind.capitalize()}",
            "",
            "| loss | use | paper: formula | needs | hyperparameters: default (values) |",
            "|---|---|---|---|---|",
        ]
        for loss in _of(kind):
            entry = ENTRIES[loss.name]
            cells = (
                f"`{loss.name}`",
                entry.use,
                f"{entry.paper}: {entry.formula}",
                ", ".join(loss.needs) or "-",
                "<br>".join(f"`{hyper.name}`: {_default_and_values(hyper)}" for hyper in loss.hyperparameters) or "-",
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    lines += ["### Quantisation terms", "", "| kind | term |", "|---|---|"]
    for kind, quantizer in QUANTIZERS.items():
        lines.append(f"| `{kind}` | {(quantizer.__doc__ or '').strip().replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


_QUANTIZATION = f"quantization = {{kind, weight}} with kind {', '.join(QUANTIZERS)}"
_OF_OUTPUTS = f"It also takes {_QUANTIZATION}, and nested = {{lengths, weights}}."
_OF_LOGITS = (
    f"Without logits the outputs are the logits, which takes as many bits as labels. It also takes {_QUANTIZATION}."
)
_OF_ALL = f"Every loss also takes {_QUANTIZATION}, and all but those of logits take nested = {{lengths, weights}}."


def _of(kind: str) -> list[Facts]:
    return [facts(name) for name, entry in ENTRIES.items() if entry.kind == kind]


def _setting(hyper: Hyperparameter) -> str:
    return f"{hyper.name} = {_default_and_values(hyper)}"


def _default_and_values(hyper: Hyperparameter) -> str:
    if isinstance(hyper.values, Numbers):
        return f"{_value(hyper.default)} ({'or ' if hyper.default is None else ''}{hyper.values})"
    others = [_value(value) for value in hyper.values if value != hyper.default]
    return f"{_value(hyper.default)} (or {', '.join(others)})"


def _value(value: Any) -> str:
    """A value as in a TOML file, which has no word for none."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _wrapped(text: str, width: int, indent: int, hanging: int = 0) -> list[str]:
    first, rest = " " * indent, " " * (indent + hanging)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
