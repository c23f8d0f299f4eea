"""Progress of a run on standard error: a bar on a terminal, and a line per epoch everywhere."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hashseek.retrieval.label_files import Problem

_SHOWN = 20  # problems: there may be thousands


class Progress:
    """Prints to standard error, so that standard output stays free for results."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def problems(self, problems: Sequence[Problem], absent: Sequence[str]) -> None:
        """Print which lines of the data set were skipped or corrected, and which labels no training image has."""
        for line in lines_of(problems):
            self.console.print(line, markup=False)
        if absent:
            self.console.print(f"note: no training image has the label {', '.join(absent)}", markup=False)

    @contextmanager
    def task(self, title: str, total: int) -> Iterator[Callable[..., None]]:
        """A bar for one task; yields the function that advances it by n and, if given, shows a text next to it."""
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), MofNCompleteColumn())
        with Bar(
            *columns,
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        ) as bar:
            task = bar.add_task(title, total=total, detail="")
            yield lambda n, detail="": bar.update(task, advance=n, detail=detail)

    def epoch(self, record: dict[str, Any], *, is_best: bool) -> None:
        """Print the line of a finished epoch."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in record.items() if name.startswith(("loss", "val_")))
        self.console.print(
            f"epoch {record['epoch']}  {shown}  {record['images_per_s']:.0f} images/s  {record['seconds']:.1f} s"
            + ("  best" if is_best else ""),
            markup=False,
        )


def lines_of(problems: Sequence[Problem]) -> list[str]:
    """A line for each problem, notes first; of many only the first ones, and how many more there are."""
    ordered = sorted(problems, key=lambda problem: problem.skipped)
    lines = [problem.line for problem in ordered[:_SHOWN]]
    return lines + ([f"and {len(ordered) - _SHOWN} more such lines"] if len(ordered) > _SHOWN else [])
