"""The losses as text, from their own declarations: for `hashseek losses` and for docs/reference/losses.md."""

import textwrap
from typing import Any

from hashseek.training.losses import LOSSES, loss_class
from hashseek.training.losses.base import KINDS, Loss
from hashseek.training.losses.hashing.quantization import QUANTIZERS
from hashseek.training.losses.hyperparameters import Choice, Flag, Hyperparameter
from hashseek.training.report_format import Table, table_as_markdown


def listing(width: int) -> str:
    """Every loss in a few lines, `width` columns wide."""
    indent = 2 + max(map(len, LOSSES)) + 2
    lines = []
    for kind in KINDS:
        lines += ["", kind.capitalize(), ""]
        for name, loss in _of(kind):
            settings = "; ".join(
                f"{hyper.name} = {_default_and_limits(hyper)}" for hyper in loss.hyperparameters().values()
            )
            parts = [
                f"{loss.use[:1].upper()}{loss.use[1:]}.",
                f"{loss.source}: {loss.formula}.",
                f"Needs: {_needs(loss) or 'nothing'}.",
                f"{settings or 'No hyperparameters'}.",
            ]
            body = [line for text in parts for line in _wrapped(text, width, indent)]
            lines += [f"  {name:<{indent - 2}}{body[0].lstrip()}", *body[1:]]
    lines += ["", *_wrapped("`hashseek losses NAME` shows one in full. " + _OF_ALL, width, 0)]
    return "\n".join(lines[1:])


def in_full(name: str, width: int) -> str:
    """One loss with its formula and the meaning of every hyperparameter.

    Raises:
        BadConfig: there is no such loss.
    """
    loss = loss_class(name)
    # The docstring of a variant is followed by that of the loss it varies.
    lines = [name, ""]
    for part in loss.__mro__:
        if issubclass(part, Loss) and part.source and part.__doc__:
            lines += [*textwrap.dedent(f"    {part.__doc__}").strip().splitlines(), ""]
    for title, text in (
        ("use", loss.use),
        ("source", loss.source),
        ("formula", loss.formula),
        ("needs", _needs(loss) or "only outputs and labels"),
    ):
        if text:
            lines += _wrapped(f"{title:<9}{text}", width, 0, hanging=9)
    lines += ["", "Hyperparameters:" if loss.hyperparameters() else "No hyperparameters."]
    for hyper in loss.hyperparameters().values():
        lines.append(f"  {hyper.name} = {_default_and_limits(hyper)}")
        lines += _wrapped(hyper.limits.meaning, width, 6)
    lines += ["", *_wrapped(_OF_LOGITS if loss.kind == "classification" else _OF_OUTPUTS, width, 0)]
    return "\n".join(lines)


def as_markdown() -> str:
    """The tables of docs/reference/losses.md."""
    lines = []
    for kind in KINDS:
        rows = [(f"`{n}`", loss.use, _without_titles(loss.source), _needs(loss) or "-") for n, loss in _of(kind)]
        table = Table(("loss", "use", "source", "needs"), rows, text_columns=4)
        lines += [f"### {kind.capitalize()}", "", table_as_markdown(table), ""]
    rows_of_terms = [(f"`{kind}`", (term.__doc__ or "").strip()) for kind, term in QUANTIZERS.items()]
    table = Table(("kind", "term"), rows_of_terms, text_columns=2)
    return "\n".join([*lines, "### Quantisation terms", "", table_as_markdown(table)]) + "\n"


_QUANTIZATION = f"quantization = {{kind, weight}} with kind {', '.join(QUANTIZERS)}"
_OF_OUTPUTS = f"It also accepts {_QUANTIZATION}, and nested = {{lengths, weights}}."
_OF_LOGITS = (
    "It reads logits; without them, the outputs are the logits, which requires as many bits as labels. It also accepts "
    f"{_QUANTIZATION}."
)
_OF_ALL = f"Every loss also accepts {_QUANTIZATION}, and all except those of logits nested = {{lengths, weights}}."


def _of(kind: str) -> list[tuple[str, type[Loss]]]:
    return [(name, loss_class(name)) for name in LOSSES if loss_class(name).kind == kind]


def _needs(loss: type[Loss]) -> str:
    queue = () if loss.memory_kind == "none" else ("queue (optional)",)
    logits = ("logits",) if loss.kind == "classification" else ("logits (optional)",) if loss.reads_logits else ()
    return ", ".join((*loss.needs, *queue, *logits))


def _without_titles(source: str) -> str:
    """Authors and venue of each paper: the first and the last part of "authors, title, venue"."""
    papers = (paper.split(", ") for paper in source.split("; "))
    return "; ".join(", ".join(dict.fromkeys((parts[0], parts[-1]))) for parts in papers)


def _default_and_limits(hyper: Hyperparameter) -> str:
    limits = hyper.limits
    if isinstance(limits, Choice | Flag):
        values = (False, True) if isinstance(limits, Flag) else limits.values
        return f"{_value(hyper.default)} (or {', '.join(_value(value) for value in values if value != hyper.default)})"
    return f"{_value(hyper.default)} ({'or ' if hyper.default is None else ''}{limits})"


def _value(value: Any) -> str:
    """A value as in a TOML file, which has no word for none."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _wrapped(text: str, width: int, indent: int, hanging: int = 0) -> list[str]:
    first, rest = " " * indent, " " * (indent + hanging)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
