"""The subcommand `index add`."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hashseek.indexing.cli.options import Device, Engine, Precision
from hashseek.indexing.collection import CATALOG, Collection, check_checkpoint, check_place, open_for_adding
from hashseek.indexing.index.hamming_index import APPROXIMATE
from hashseek.indexing.ingest.batch import Report, find_sources, ingest, preview
from hashseek.indexing.ingest.remote import MAX_BYTES, SECONDS, fetch
from hashseek.indexing.ingest.sources import Found, KeyFrom, describe, survey, until
from hashseek.indexing.ingest.watching import Watch
from hashseek.indexing.printing import printable
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadCollection, BadConfig
from hashseek.retrieval.label_files import Problem

_N_SHOWN = 20  # problems on the terminal when a file takes all of them
_EVERY = 30.0  # seconds between two lines of progress where there is no terminal


def add(
    collection: Annotated[Path, typer.Argument(help="Folder of the collection.")],
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Images, folders, patterns, lists (.csv, .jsonl, .parquet, .txt), tars, http(s) addresses."
        ),
    ],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Needed for a new collection; of an existing one it must be the same.")
    ] = None,
    split: Annotated[
        Literal["query", "train", "database"] | None, typer.Option(help="Of a list, add only this split.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="Give every image this label too; may be repeated.")] = None,
    key_from: Annotated[
        KeyFrom | None, typer.Option(help="Make this the key of images that bring none: changed files then update.")
    ] = None,
    on_error: Annotated[Literal["skip", "stop"], typer.Option(help="Leave bad images out, or stop at one.")] = "skip",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if an image was skipped.")] = False,
    errors: Annotated[Path | None, typer.Option(help="Write every problem to this file as a line of JSON.")] = None,
    trust_mtime: Annotated[
        bool, typer.Option("--trust-mtime", help="Do not read files whose size and time are as they were stored.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read everything, say what would happen, and write nothing.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on watching the folders for new and changed files until stopped.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="With --watch: remove images whose files were deleted.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.1, help="With --watch: seconds between two looks.")] = 2.0,
    allow_private: Annotated[
        bool, typer.Option("--allow-private", help="Fetch from addresses that are not public, too.")
    ] = False,
    url_megabytes: Annotated[int, typer.Option(min=1, help="Longest answer that is fetched, in MiB.")] = MAX_BYTES
    // 2**20,
    url_seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds for fetching an image, with all retries.")
    ] = SECONDS,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "torch",
) -> None:
    """Add images to a collection. Running it again goes on where it stopped: nothing is stored twice.

    Exits with 0 if images were stored or had been, 1 if there was none that could be, 2 if it was refused, 3 with
    --strict if an image was skipped, 130 or 143 if it was stopped.
    """
    without = {"--dry-run": dry_run, "--split": split, "--key-from": key_from, "--trust-mtime": trust_mtime}
    _check_together(watch=watch, prune=prune, without=without)
    folders = [_folder(path) for path in paths] if watch else []
    sources = find_sources(paths, split=split)
    visible = Console(stderr=True).is_terminal
    counts = (visible or on_error == "stop") and not watch  # which reads no lists, and never ends
    total = survey(paths, split=split, on_error=on_error) if counts else None
    get = partial(fetch, allow_private=allow_private, max_bytes=url_megabytes * 2**20, seconds=url_seconds)
    extra = label or []
    with ExitStack() as stack:
        shown = _Shown(errors, stack.enter_context(_begun(errors)) if errors else None)
        if dry_run:
            described = describe(sources, labels=extra, key_from=key_from)
            say = partial(preview, sources=described, on_error=on_error, fetch=get)
            n_images, report = _preview(collection, checkpoint, say, trust_mtime, shown, total)
            place = f"nothing was written; {collection} holds {n_images} images"
            typer.echo(f"dry run: {_outcome(report, of='would be ')}; {place}")
            _conclude(report, strict=strict)
            return
        opened = stack.enter_context(open_for_adding(collection, checkpoint=checkpoint))
        encoder = Searcher.open(opened, device=device, precision=precision, engine=engine).encoder
        stop = stack.enter_context(_stopping())
        store = partial(ingest, opened, encoder, on_error=on_error, fetch=get)
        if watch:
            watched = Watch(opened, folders, labels=extra)
            report = _watch(watched, opened, store, stop, shown, prune=prune, every=every)
        else:
            described = describe(until(sources, stop.event.is_set), labels=extra, key_from=key_from)
            reports = stack.enter_context(closing(store(described, trust_mtime=trust_mtime)))
            report = shown.follow(reports, total)
        opened.save_index()
        n_images = len(opened)
    typer.echo(f"{_outcome(report)}; {collection} holds {n_images} images")
    if stop.code:
        typer.echo("stopped: run the same command to go on; what is stored is not stored twice", err=True)
        raise typer.Exit(stop.code)
    _conclude(report, strict=strict)


def _conclude(report: Report, *, strict: bool) -> None:
    if report.added + report.updated + report.known == 0:
        if not report.skipped:
            typer.echo("hashseek: there is no image in what was named", err=True)
        raise typer.Exit(1)
    if strict and report.skipped:
        raise typer.Exit(3)


def _outcome(report: Report, of: str = "") -> str:
    updated = f"{of}updated {report.updated}, " if report.updated else ""
    return f"{of}added {report.added}, {updated}already stored {report.known}, skipped {report.skipped}"


def _check_together(*, watch: bool, prune: bool, without: Mapping[str, object]) -> None:
    if prune and not watch:
        raise BadConfig("--prune goes with --watch: add it, or leave --prune out")
    given = [option for option, value in without.items() if value]
    if watch and given:
        raise BadConfig(f"--watch and {given[0]} do not go together: leave one out")


def _folder(path: str) -> Path:
    if not Path(path).is_dir():
        raise BadConfig(f"{path} is no folder: --watch takes folders")
    return Path(path)


def _begun(errors: Path) -> TextIO:
    """The file that takes every problem, empty."""
    if not errors.parent.is_dir():
        raise BadConfig(f"there is no folder {errors.parent} for --errors {errors.name}: create it, or name another")
    return errors.open("w", encoding="utf-8")


def _preview(
    folder: Path,
    checkpoint: Path | None,
    say: Callable[..., Iterator[Report]],
    trust_mtime: bool,
    shown: "_Shown",
    total: int | None,
) -> tuple[int, Report]:
    """(images in the collection, what adding would do); `say` is `preview`, told what is to be added."""
    if not (folder / CATALOG).is_file():
        if checkpoint is None:
            raise BadCollection(
                f"there is no collection {folder} yet: name the checkpoint to create it with (--checkpoint)"
            )
        preprocessing = load_header(checkpoint).image_preprocessing()
        check_place(folder)
        return 0, shown.follow(say(None, preprocessing), total)
    with closing(Collection(folder, read_only=True)) as opened:
        header = check_checkpoint(opened.catalog, checkpoint or opened.checkpoint)
        steps = say(opened.catalog, header.image_preprocessing(), trust_mtime=trust_mtime)
        return len(opened), shown.follow(steps, total)


def _watch(
    watch: Watch,
    collection: Collection,
    store: Callable[[Iterable[Found]], Generator[Report, None, None]],
    stop: "_Stop",
    shown: "_Shown",
    *,
    prune: bool,
    every: float,
) -> Report:
    """Follow the folders until stopped; the sum of all rounds."""
    total = Report()
    while True:
        report, removed = Report(), list[int]()
        with closing(store(until(watch.changes(), stop.event.is_set))) as reports:
            for report in reports:
                shown.show(report.problems)
                watch.settle(report)
        if prune and not stop.event.is_set() and (removed := watch.gone()):
            collection.remove(removed, missing_ok=True)
        if report.done or removed:
            typer.echo(
                f"{_outcome(report)}, removed {len(removed)}; {collection.folder} holds {len(collection)} images"
            )
        if collection.kind not in APPROXIMATE:  # which takes long, and nobody searches here
            collection.merge_segments()
        total = total.plus(report)
        if stop.event.wait(every):
            return total


class _Shown:
    """Tells the user how far it is, and what went wrong; a file, if there is one, gets every problem."""

    def __init__(self, path: Path | None, file: TextIO | None) -> None:
        self._path, self._file, self._n_shown = path, file, 0
        self._console = Console(stderr=True)

    def follow(self, reports: Iterable[Report], total: int | None) -> Report:
        """The last report; on a terminal with a bar, elsewhere with a line now and then."""
        report, started = Report(), time.monotonic()
        next_line = started + _EVERY
        bar = Progress(
            TextColumn("adding"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        with bar:
            task = bar.add_task("adding", total=total, state="")
            for report in reports:
                speed = report.done / max(time.monotonic() - started, 1e-9)
                state = f"{report.done:,} of {total:,}" if total is not None else f"{report.done:,}"
                state += f", {speed:,.0f} images/s, {report.skipped:,} skipped"
                bar.update(task, completed=report.done, state=state)
                self.show(report.problems)
                if not self._console.is_terminal and time.monotonic() >= next_line:
                    typer.echo(f"{state}", err=True)
                    next_line = time.monotonic() + _EVERY
        return report

    def show(self, problems: Iterable[Problem]) -> None:
        """Print problems; where a file takes them all, only the first."""
        for problem in problems:
            if self._file is not None:
                self._file.write(json.dumps(asdict(problem)) + "\n")
            if self._file is None or self._n_shown < _N_SHOWN:
                self._console.print(
                    f"{'skipped' if problem.skipped else 'note'}: {printable(str(problem))}",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
            elif self._n_shown == _N_SHOWN:
                typer.echo(f"and more: see {self._path}", err=True)
            self._n_shown += 1
        if self._file is not None:
            self._file.flush()


@dataclass
class _Stop:
    """Whether somebody asked to stop, and the exit code that says so."""

    event: threading.Event = field(default_factory=threading.Event)
    code: int = 0


@contextmanager
def _stopping() -> Iterator[_Stop]:
    """The first SIGINT or SIGTERM asks to finish what is in hand, the second ends at once."""
    stop = _Stop()

    def ask(number: int, _: FrameType | None) -> None:
        if stop.event.is_set():
            raise KeyboardInterrupt
        stop.code = 128 + number
        stop.event.set()
        os.write(2, b"stopping: what is in hand is being stored; once more stops at once\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
