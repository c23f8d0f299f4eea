"""Progress of a run on standard error: a bar on a terminal, and a line per epoch everywhere."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from hashseek.retrieval.label_files import Problem


class Progress:
    """Prints to standard error, so that standard output stays free for results."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def problems(self, problems: Sequence[Problem], absent: Sequence[str]) -> None:
        """Print which lines of the data set were skipped or corrected, and which labels no training image has."""
        for problem in problems[:20]:
            self.console.print(f"{'skipped' if problem.skipped else 'note'}: {problem}", markup=False)
        if len(problems) > 20:
            self.console.print(f"... and {len(problems) - 20} more such lines")
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
            + ("  best" if is_best else "")
        )
