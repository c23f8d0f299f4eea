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
        self._bar: Bar | None = None

    def problems(self, problems: Sequence[Problem], absent: Sequence[str]) -> None:
        """Print which lines of the data set were skipped or repaired, and which labels no training image has."""
        for problem in problems[:20]:
            self.console.print(f"{'skipped' if problem.skipped else 'note'}: {problem}", markup=False)
        if len(problems) > 20:
            self.console.print(f"... and {len(problems) - 20} more such lines")
        if absent:
            self.console.print(f"note: no training image has the label {', '.join(absent)}", markup=False)

    def held_out(self, names: Sequence[str], *, n_images: int) -> None:
        """Print which labels are held out, and how many images are left to train on."""
        self.console.print(
            f"note: held out of training: {', '.join(names)}; {n_images} training images carry none of them",
            markup=False,
        )

    @contextmanager
    def task(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar for one task; yields the function that advances it."""
        with self._new_bar() as bar:
            task = bar.add_task(title, total=total, detail="")
            yield lambda n: bar.advance(task, n)

    def start_epoch(self, epoch: int, epochs: int, n_images: int) -> None:
        """Open the bar of an epoch (from 0)."""
        self._bar = self._new_bar()
        self._bar.start()
        self._bar.add_task(f"epoch {epoch + 1}/{epochs}", total=n_images, detail="")

    def advance(self, n: int, terms: dict[str, float]) -> None:
        """Count `n` images and show the terms of their loss."""
        if self._bar is None:
            return
        task = self._bar.tasks[0]
        detail = "  ".join(f"{name} {value:.4f}" for name, value in terms.items())
        speed = f"{task.speed:.0f} images/s" if task.speed else ""
        self._bar.update(task.id, advance=n, detail=f"{detail}  {speed}")

    def end_epoch(self, record: dict[str, Any], *, is_best: bool) -> None:
        """Close the bar and print the epoch's line."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        shown = "  ".join(f"{name} {value:.4f}" for name, value in record.items() if name.startswith(("loss", "val_")))
        self.console.print(
            f"epoch {record['epoch']}  {shown}  {record['images_per_s']:.0f} images/s  {record['seconds']:.1f} s"
            + ("  best" if is_best else "")
        )

    def _new_bar(self) -> Bar:
        return Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
