"""The subcommand `index add`."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hashseek.indexing.cli.options import AllowPrivate, CollectionArgument, Device, Engine, Precision, encoder_options
from hashseek.indexing.collection import Collection, open_for_adding
from hashseek.indexing.dry_run import dry_run as open_dry_run
from hashseek.indexing.index.hamming_index import APPROXIMATE
from hashseek.indexing.ingest.batch import IngestReport, ingest
from hashseek.indexing.ingest.remote import MAX_BYTES, SECONDS, fetch
from hashseek.indexing.ingest.sources import Found, KeyFrom, count_images, describe, find_sources, until
from hashseek.indexing.ingest.watching import Watch
from hashseek.indexing.kept_files import FILES
from hashseek.indexing.printing import printable
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.label_files import Problem

_N_SHOWN = 20  # problems printed on the terminal if a file receives all of them
_PROGRESS_SECONDS = 30.0  # between two lines of progress if there is no terminal


def add(
    collection: CollectionArgument,
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Images, folders, glob patterns, lists (.csv, .jsonl, .parquet, .txt), tar files or http(s) URLs."
        ),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Required for a new collection; an existing one has its own copy."),
    ] = None,
    keep_features: Annotated[
        bool,
        typer.Option(
            "--keep-features",
            help="For a new collection: also store features (2 bytes a number), for `search --rank float`.",
        ),
    ] = False,
    split: Annotated[
        Literal["query", "train", "database"] | None, typer.Option(help="Add only this split of a list.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="Add this label to every image; may be repeated.")] = None,
    key_from: Annotated[
        KeyFrom | None,
        typer.Option(help="Use this as the key of images without one, so that changed files update their records."),
    ] = None,
    on_error: Annotated[Literal["skip", "stop"], typer.Option(help="What to do if an image cannot be used.")] = "skip",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 3 if an image was skipped.")] = False,
    errors: Annotated[Path | None, typer.Option(help="Write every problem to this file, as JSON lines.")] = None,
    trust_mtime: Annotated[
        bool, typer.Option("--trust-mtime", help="Do not read files whose size and modification time are unchanged.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read and check all images and print the outcome, but store nothing.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep watching the folders for new and changed files until stopped.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="With --watch: remove images whose files were deleted.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.1, help="With --watch: seconds between two checks.")] = 2.0,
    allow_private: AllowPrivate = False,
    url_megabytes: Annotated[int, typer.Option(min=1, help="Largest file to download, in MiB.")] = MAX_BYTES // 2**20,
    url_seconds: Annotated[
        float, typer.Option(min=0.1, help="Time limit for downloading one image, with all retries.")
    ] = SECONDS,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "torch",
) -> None:
    """Add images to a collection. If it is interrupted, run the same command again: nothing is stored twice.

    Exit codes: 0 if images were stored (now or earlier), 1 if there were none to store, 2 if the command was refused,
    3 with --strict if an image was skipped, 130 or 143 if it was stopped.
    """
    if prune and not watch:
        raise BadConfig("--prune needs --watch: add it, or leave out --prune")
    excluded = {"--dry-run": dry_run, "--split": split, "--key-from": key_from, "--trust-mtime": trust_mtime}
    for option, value in excluded.items():
        if watch and value:
            raise BadConfig(f"--watch and {option} cannot be used together: leave one out")
    options = encoder_options(device, precision, engine)
    folders = [_watchable(path) for path in paths] if watch else []
    sources = find_sources(paths, split=split)
    get = partial(fetch, allow_private=allow_private, max_bytes=url_megabytes * 2**20, seconds=url_seconds)
    with ExitStack() as stack:
        output = _Output(errors, stack.enter_context(_open_errors(errors)) if errors else None)

        def total() -> int | None:
            # Counting refuses bad lists early with --on-error stop; otherwise only a progress bar needs the number.
            needed = output.is_terminal or on_error == "stop"
            return count_images(paths, split=split, on_error=on_error) if needed else None

        if dry_run:
            target, stand_in = stack.enter_context(open_dry_run(collection, checkpoint=checkpoint))
            described = describe(sources, labels=label or [], key_from=key_from)
            reports = ingest(target, stand_in, described, on_error=on_error, trust_mtime=trust_mtime, fetch=get)
            n_images = len(target.catalog)
            report = output.follow(reports, total())
            outcome = _outcome(report, prefix="would be ")
            typer.echo(f"dry run: {outcome}; nothing was written; {collection} holds {n_images} images")
            _exit_with_code(report, strict=strict)
            return
        opened = stack.enter_context(open_for_adding(collection, checkpoint=checkpoint, keep_features=keep_features))
        n_total = None if watch else total()
        encoder = Searcher.open(opened, **options).encoder
        stop = stack.enter_context(_stop_on_signals())
        store = partial(ingest, opened, encoder, on_error=on_error, fetch=get)
        if watch:
            watched = Watch(opened.catalog, folders, ignore=opened.folder / FILES, labels=label or [])
            report = _follow_folders(watched, opened, store, stop, output, prune=prune, every=every)
        else:
            described = describe(until(sources, stop.event.is_set), labels=label or [], key_from=key_from)
            reports = stack.enter_context(closing(store(described, trust_mtime=trust_mtime)))
            report = output.follow(reports, n_total)
        opened.save_index()
        n_images = len(opened)
    typer.echo(f"{_outcome(report)}; {collection} holds {n_images} images")
    if stop.code:
        typer.echo("stopped: run the same command again to continue; nothing is stored twice", err=True)
        raise typer.Exit(stop.code)
    _exit_with_code(report, strict=strict)


def _exit_with_code(report: IngestReport, *, strict: bool) -> None:
    if report.added + report.updated + report.known == 0:
        if not report.skipped:
            typer.echo("hashseek: no images were found in these paths", err=True)
        raise typer.Exit(1)
    if strict and report.skipped:
        raise typer.Exit(3)


def _outcome(report: IngestReport, prefix: str = "") -> str:
    updated = f"{prefix}updated {report.updated}, " if report.updated else ""
    return f"{prefix}added {report.added}, {updated}already stored {report.known}, skipped {report.skipped}"


def _watchable(path: str) -> Path:
    if not Path(path).is_dir():
        raise BadConfig(f"{path} is not a folder: --watch takes folders")
    return Path(path)


def _open_errors(path: Path) -> TextIO:
    if not path.parent.is_dir():
        raise BadConfig(f"there is no folder {path.parent} for --errors {path.name}: create it, or name another file")
    return path.open("w", encoding="utf-8")


def _follow_folders(
    watch: Watch,
    collection: Collection,
    store: Callable[[Iterable[Found]], Generator[IngestReport, None, None]],
    stop: "_Stop",
    output: "_Output",
    *,
    prune: bool,
    every: float,
) -> IngestReport:
    """Keep the collection in step with the folders until stopped; the sum of all rounds."""
    total = IngestReport()
    while True:
        report, deleted = IngestReport(), list[int]()
        with closing(store(until(watch.changes(), stop.event.is_set))) as reports:
            for report in reports:
                output.show(report.problems)
                watch.settle(report)
        if prune and not stop.event.is_set() and (deleted := watch.deleted()):
            collection.remove(deleted, missing_ok=True)
        if report.done or deleted:
            typer.echo(
                f"{_outcome(report)}, removed {len(deleted)}; {collection.folder} holds {len(collection)} images"
            )
        if collection.kind not in APPROXIMATE:  # these take long to build, and this process does not search
            collection.merge_segments()
        total = total.plus(report)
        if stop.event.wait(every):
            return total


class _Output:
    """Prints progress and problems, and writes all problems to a file if there is one."""

    def __init__(self, path: Path | None, file: TextIO | None) -> None:
        self._path, self._file, self._n_shown = path, file, 0
        self._console = Console(stderr=True)

    @property
    def is_terminal(self) -> bool:
        """Whether a progress bar can be shown."""
        return self._console.is_terminal

    def follow(self, reports: Iterable[IngestReport], total: int | None) -> IngestReport:
        """Show progress as a bar, or as a line every 30 s without a terminal; returns the last report."""
        report, started = IngestReport(), time.monotonic()
        next_line = started + _PROGRESS_SECONDS
        columns = TextColumn("adding"), BarColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn()
        with Progress(*columns, console=self._console, transient=True, disable=not self.is_terminal) as bar:
            task = bar.add_task("adding", total=total, state="")
            for report in reports:
                speed = report.done / max(time.monotonic() - started, 1e-9)
                state = f"{report.done:,} of {total:,}" if total is not None else f"{report.done:,}"
                state += f", {speed:,.0f} images/s, {report.skipped:,} skipped"
                bar.update(task, completed=report.done, state=state)
                self.show(report.problems)
                if not self.is_terminal and time.monotonic() >= next_line:
                    typer.echo(state, err=True)
                    next_line = time.monotonic() + _PROGRESS_SECONDS
        return report

    def show(self, problems: Iterable[Problem]) -> None:
        """Print problems; if a file receives all of them, only the first ones."""
        for problem in problems:
            if self._file is not None:
                self._file.write(json.dumps(asdict(problem)) + "\n")
            if self._file is None or self._n_shown < _N_SHOWN:
                line = f"{'skipped' if problem.skipped else 'note'}: {printable(str(problem))}"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            elif self._n_shown == _N_SHOWN:
                typer.echo(f"more problems are in {self._path}", err=True)
            self._n_shown += 1
        if self._file is not None:
            self._file.flush()


@dataclass
class _Stop:
    """Whether a signal asked to stop, and the exit code for it."""

    event: threading.Event = field(default_factory=threading.Event)
    code: int = 0


@contextmanager
def _stop_on_signals() -> Iterator[_Stop]:
    """The first SIGINT or SIGTERM asks to finish the current batch, the second one ends at once."""
    stop = _Stop()

    def ask(number: int, _: FrameType | None) -> None:
        if stop.event.is_set():
            raise KeyboardInterrupt
        stop.code = 128 + number
        stop.event.set()
        os.write(2, b"stopping after the current batch; press Ctrl-C again to stop at once\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
