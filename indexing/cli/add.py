"""The subcommand `index add`."""

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from hashseek.indexing.cli.fitting import (
    Backbone,
    Bits,
    PreprocessingOption,
    Weights,
    fit_options,
    fit_progress,
    print_fit,
)
from hashseek.indexing.cli.options import (
    AllowPrivate,
    Device,
    Engine,
    Precision,
    StoreArgument,
    encoder_options,
    not_default,
    refuse,
)
from hashseek.indexing.cli.output import Output
from hashseek.indexing.cli.vectors import add_vectors
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.dry_run import dry_run as open_dry_run
from hashseek.indexing.fitting import MAX_FITTED, fit_to_sources, plan_collection
from hashseek.indexing.index.approximate import APPROXIMATE
from hashseek.indexing.ingest.batch import IngestReport, ingest
from hashseek.indexing.ingest.loading import Fetch
from hashseek.indexing.ingest.sources import Found, KeyFrom, count_images, describe, find_sources, until
from hashseek.indexing.ingest.watching import Watch
from hashseek.indexing.kept_files import FILES
from hashseek.indexing.maintenance.exchange import add_exports
from hashseek.indexing.milvus_uri import is_in_milvus, parse_uri
from hashseek.indexing.opening import Store, open_for_adding
from hashseek.indexing.printing import printable
from hashseek.indexing.ray_encoding import Cluster, encode_shards
from hashseek.indexing.remote import MAX_BYTES, SECONDS, fetch, is_remote
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.checkpoint import Header, load_header
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.label_files import OnError

REFIT_FACTOR = 4  # a collection that has grown by this factor may gain from a refit


def add(
    collection: StoreArgument,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            help="Images, folders, glob patterns, lists (.csv, .jsonl, .parquet, .txt), tar files or http(s) URLs."
        ),
    ] = None,
    vectors: Annotated[
        Path | None,
        typer.Option(
            help="Instead of images: vectors computed by another program, as the rows of an .npy file, or as a Parquet "
            "file with the columns id and vector."
        ),
    ] = None,
    ids: Annotated[
        Path | None,
        typer.Option(help="Ids of the vectors of an .npy file: one per line, or a list with a column id."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Checkpoint for a new collection; default: fit a hash layer to the images, without labels."),
    ] = None,
    bits: Bits = None,
    backbone: Backbone = None,
    weights: Weights = None,
    preprocessing: PreprocessingOption = None,
    keep_features: Annotated[
        bool,
        typer.Option(
            "--keep-features",
            help="For a new collection: also store features (2 bytes per number), for `search --rank float`.",
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
        bool, typer.Option("--trust-mtime", help="Skip files whose size and modification time are unchanged.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read and check all images and print the result, but store nothing.")
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
    engine: Engine = "auto",
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Encode on a Ray cluster: local (start one here), auto (one already running here) or HOST:PORT.",
        ),
    ] = None,
    ray_workers: Annotated[
        int | None, typer.Option(min=1, help="Number of encoding processes; default: as many as fit.")
    ] = None,
    ray_cpus: Annotated[float, typer.Option(min=0.1, help="Processor cores per process.")] = 1,
    ray_gpus: Annotated[float, typer.Option(min=0, help="GPUs per process; with 0.25, four share one.")] = 0,
    shards: Annotated[
        Path | None, typer.Option(help="With --ray: folder for the encoded images; default COLLECTION.shards.")
    ] = None,
    shard_size: Annotated[
        int,
        typer.Option(min=1, help="With --ray: average number of images per shard; a worker that dies loses one shard."),
    ] = 1024,
) -> None:
    """Add images or vectors to a collection. If interrupted, run the same command again: nothing is stored twice.

    A new collection needs no checkpoint: a hash layer fitted to the images (at most 20,000 of them), without labels,
    turns the features of a published network into codes. For vectors, it is fitted to the vectors themselves.

    Exit codes: 0 if images were stored (now or earlier), 1 if there were none to store, 2 if the command was refused,
    3 with --strict if an image was skipped, 130 or 143 if the command was stopped.
    """
    if prune and not watch:
        raise BadConfig("--prune needs --watch: add it, or leave out --prune")
    excluded: dict[str, object] = {"--dry-run": dry_run, "--split": split, "--key-from": key_from}
    excluded["--trust-mtime"] = trust_mtime
    if watch:
        refuse("--watch", excluded)
    cluster = None if ray is None else Cluster(ray, ray_workers, ray_cpus, ray_gpus)
    if cluster is not None:
        not_by_ray = {"--vectors": vectors, "--watch": watch, "--dry-run": dry_run, "--trust-mtime": trust_mtime}
        refuse("--ray", not_by_ray | {"--keep-features": keep_features, "--on-error stop": on_error == "stop"})
        cluster.check()
    fit = fit_options(bits, backbone, weights, preprocessing)
    if not vectors and (ids or not paths):
        raise BadConfig("--ids needs --vectors" if ids else "nothing to add: give images, or vectors with --vectors")
    if checkpoint is not None and fit:
        raise BadConfig(
            "--checkpoint already has a hash layer: leave out --bits, --backbone, --weights and --preprocessing"
        )
    if is_in_milvus(collection):
        uri = parse_uri(collection)
        refuse(f"the collection {uri}", {"--watch": watch, "--dry-run": dry_run})
        if checkpoint is None:
            raise BadConfig(f"{uri} keeps no checkpoint: give the one for its codes with --checkpoint")
    options = encoder_options(device, precision, engine)
    get = partial(fetch, allow_private=allow_private, max_bytes=url_megabytes * 2**20, seconds=url_seconds)
    if vectors is not None:
        excluded |= {"paths of images": paths, "--backbone": backbone, "--weights": weights, "--watch": watch}
        excluded |= {"--preprocessing": preprocessing, "--errors": errors, "--strict": strict}
        refuse("--vectors", excluded | not_default(device, precision, engine))
        if (collection / CATALOG).is_file() and fit:
            fit.check_agrees(collection)
        mine = label or []
        add_vectors(
            collection, vectors, ids, bits=fit.bits, checkpoint=checkpoint, keep_features=keep_features, labels=mine
        )
        return
    assert paths is not None
    folders = [_watchable(path) for path in paths] if watch else []
    sources = _Sources(paths, split, label or [], key_from, on_error)
    sources.check()
    started = time.monotonic()
    with ExitStack() as stack:
        output = Output(stack.enter_context(errors.open("w", encoding="utf-8")) if errors else None)
        plan = None
        if not (collection / CATALOG).is_file() and checkpoint is None:
            sources.refuse_problems()
            plan = plan_collection(collection, fit, sources.found())
        elif fit:
            fit.check_agrees(collection)
        if dry_run:
            _dry_run(collection, checkpoint, sources, get, output, trust_mtime=trust_mtime, strict=strict)
            return
        first = None
        if plan is not None:
            with fit_progress(output) as progress:
                first = fit_to_sources(
                    sources.found(), *plan, on_error=on_error, fetch=get, progress=progress, **options
                )
            print_fit(first.fitting)
        with ExitStack() as scratch:
            made = checkpoint if first is None else scratch.enter_context(first.fitting.checkpoint())
            opened = stack.enter_context(open_for_adding(collection, checkpoint=made, keep_features=keep_features))
        n_total = None if watch else sources.total(output)
        encoder = None
        if cluster is None:  # else its workers encode
            encoder = Searcher.open(opened, **options).image_encoder if first is None else first.fitting.encoder
        elif opened.keeps_features:
            raise BadConfig(f"{collection} keeps features, which --ray does not support: leave out --ray")
        stop = stack.enter_context(_stop_on_signals())

        def store(found: Iterable[Found], *, trust_mtime: bool = False) -> Generator[IngestReport, None, None]:
            assert encoder is not None
            images = found if first is None else first.reuse(found)
            return ingest(opened, encoder, images, on_error=on_error, trust_mtime=trust_mtime, fetch=get)

        if watch:
            assert isinstance(opened, Collection)
            watched = Watch(opened.catalog, folders, ignore=opened.folder / FILES, labels=label or [])
            report = _follow_folders(watched, opened, store, stop, output, prune=prune, every=every)
        else:
            if cluster is None:
                steps = store(until(sources.found(), stop.event.is_set), trust_mtime=trust_mtime)
            else:
                name = parse_uri(collection).name if is_in_milvus(collection) else str(collection)
                place = shards or Path(f"{name}.shards")
                with output.progress("encoding") as show:
                    files = encode_shards(
                        sources.found(),
                        place,
                        collection=opened,
                        cluster=cluster,
                        options=options,
                        fetch=get,
                        shard_size=shard_size,
                        stopped=stop.event.is_set,
                        progress=lambda done, more: show(done, n_total, more),
                    )
                if files:
                    typer.echo(f"{place}: {sum(files.values())} images in {len(files)} shards")
                steps = add_exports((file for file in files if not stop.event.is_set()), opened)
            reports = stack.enter_context(closing(steps))
            report = output.follow(reports, n_total)
        opened.save_index()
        n_images = len(opened)
        seconds = f"; {time.monotonic() - started:.1f} s" if first is not None else ""
        typer.echo(f"{_outcome(report)}; {opened.place} holds {n_images} images{seconds}")
        if not stop.code:
            if first is not None:
                _suggest(opened)
            elif isinstance(opened, Collection):
                _suggest_refit(opened, load_header(opened.checkpoint))
    if stop.code:
        typer.echo("stopped: run the same command again to continue; nothing is stored twice", err=True)
        raise typer.Exit(stop.code)
    _exit_with_code(report, strict=strict)


@dataclass(frozen=True)
class _Sources:
    """The images that the command names."""

    paths: list[str]
    split: str | None
    labels: list[str]
    key_from: KeyFrom | None
    on_error: OnError

    def check(self) -> None:
        """Refuse paths that do not exist."""
        find_sources(self.paths, split=self.split)

    def refuse_problems(self) -> None:
        """With --on-error stop, refuse lists with problems."""
        if self.on_error == "stop":
            count_images(self.paths, split=self.split, on_error="stop")

    def found(self) -> Iterator[Found]:
        """The images with their labels and keys, and problems; each call finds them again."""
        return describe(find_sources(self.paths, split=self.split), labels=self.labels, key_from=self.key_from)

    def total(self, output: Output) -> int | None:
        """Their number, if needed for a progress bar, or for --on-error stop, which refuses bad lists early."""
        if not output.is_terminal and self.on_error == "skip":
            return None
        return count_images(self.paths, split=self.split, on_error=self.on_error)


def _suggest(collection: Store) -> None:
    """Print the two commands that come next."""
    path = next((image.path for image in collection.browse(None, limit=1)[0]), "")
    if path:
        name = shlex.quote(collection.place)
        image = "PICTURE.jpg" if is_remote(path) else shlex.quote(path)
        typer.echo(f"next:\n  hashseek search {name} {printable(image)}\n  hashseek serve {name}")


def _suggest_refit(collection: Collection, header: Header) -> None:
    """Recommend a refit if the hash layer was fitted to a small part of the images."""
    n_fitted = header.training.get("fit", {}).get("n_images", MAX_FITTED)
    if n_fitted < MAX_FITTED and REFIT_FACTOR * n_fitted <= len(collection):
        typer.echo(
            f"the hash layer was fitted to only {n_fitted:,} images: for better results, refit it with "
            f"`hashseek index refit {shlex.quote(collection.place)}`"
        )


def _dry_run(
    folder: Path,
    checkpoint: Path | None,
    sources: _Sources,
    get: Fetch,
    output: Output,
    *,
    trust_mtime: bool,
    strict: bool,
) -> None:
    """Print what would happen."""
    with open_dry_run(folder, checkpoint=checkpoint) as (target, stand_in):
        reports = ingest(
            target, stand_in, sources.found(), on_error=sources.on_error, trust_mtime=trust_mtime, fetch=get
        )
        n_images = len(target)
        report = output.follow(reports, sources.total(output))
    outcome = _outcome(report, prefix="would be ")
    typer.echo(f"dry run: {outcome}; nothing was written; {folder} holds {n_images} images")
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
        raise BadConfig(f"{path} is not a folder: --watch needs folders")
    return Path(path)


def _follow_folders(
    watch: Watch,
    collection: Collection,
    store: Callable[[Iterable[Found]], Generator[IngestReport, None, None]],
    stop: "_Stop",
    output: Output,
    *,
    prune: bool,
    every: float,
) -> IngestReport:
    """Keep the collection in sync with the folders until stopped; returns the sum of all rounds."""
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
        if not total.done and report.done:  # for a new collection, other processes would build it each time
            collection.save_index()
        elif collection.kind not in APPROXIMATE:  # these take long to build, and this process does not search
            collection.merge_segments()
        total = total.plus(report)
        if stop.event.wait(every):
            return total


@dataclass
class _Stop:
    """Whether a signal asked to stop, and the matching exit code."""

    event: threading.Event = field(default_factory=threading.Event)
    code: int = 0


@contextmanager
def _stop_on_signals() -> Iterator[_Stop]:
    """The first SIGINT or SIGTERM stops after the current batch, the second one at once."""
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
