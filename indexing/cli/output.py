"""What the `index` commands show: progress, problems, and the commands that come next."""

import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hashseek.indexing.ingest.batch import IngestReport
from hashseek.indexing.printing import printable
from hashseek.retrieval.label_files import Problem

N_SHOWN = 20  # of a long list, on the terminal
_PROGRESS_SECONDS = 30.0  # between two lines of progress if there is no terminal


class Output:
    """Prints progress and problems, and writes all problems to a file if there is one."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file, self._n_shown = file, 0
        self._console = Console(stderr=True)

    @property
    def is_terminal(self) -> bool:
        """Whether a progress bar can be shown."""
        return self._console.is_terminal

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[..., None]]:
        """A function (done, total, more="") that shows progress: as a bar, or without a terminal as a line every 30 s.

        `total` may be None; `more` is shown after the numbers.
        """
        started = time.monotonic()
        next_line = started + _PROGRESS_SECONDS
        columns = TextColumn(what), BarColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn()
        with Progress(*columns, console=self._console, transient=True, disable=not self.is_terminal) as bar:
            task = bar.add_task(what, total=None, state="")

            def show(done: int, total: int | None, more: str = "") -> None:
                nonlocal next_line
                speed = done / max(time.monotonic() - started, 1e-9)
                state = f"{done:,} of {total:,}" if total is not None else f"{done:,}"
                state += f", {speed:,.0f}/s{more}"
                bar.update(task, completed=done, total=total, state=state)
                if not self.is_terminal and time.monotonic() >= next_line:
                    typer.echo(f"{what}: {state}", err=True)
                    next_line = time.monotonic() + _PROGRESS_SECONDS

            yield show

    def follow(self, reports: Iterable[IngestReport], total: int | None) -> IngestReport:
        """Show the progress of `ingest` and its problems; returns the last report."""
        report = IngestReport()
        with self.progress("adding") as progress:
            for report in reports:
                progress(report.done, total, f", {report.skipped:,} skipped")
                self.show(report.problems)
        return report

    def show(self, problems: Iterable[Problem]) -> None:
        """Print problems; only the first ones if all of them go to a file."""
        for problem in problems:
            if self._file is not None:
                self._file.write(json.dumps(asdict(problem)) + "\n")
            if self._file is None or self._n_shown < N_SHOWN:
                line = printable(problem.line)
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            elif self._n_shown == N_SHOWN:
                typer.echo(f"more problems are in {self._file.name}", err=True)
            self._n_shown += 1
        if self._file is not None:
            self._file.flush()


def print_next(place: str, query: str) -> None:
    """Print the two commands that come after creating a collection; `query`: arguments of `hashseek search`."""
    name = shlex.quote(place)
    typer.echo(f"next:\n  hashseek search {name} {printable(query)}\n  hashseek serve {name}")
