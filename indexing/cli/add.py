"""The subcommand `index add`."""

import shlex
import time
from collections.abc import Container, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from hashseek.indexing.catalog import CatalogLocked
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
    ENCODING,
    AllowPrivate,
    Device,
    Engine,
    Precision,
    StoreArgument,
    encoder_options,
    given_options,
    refuse,
    refuse_without,
)
from hashseek.indexing.cli.output import Output, print_next
from hashseek.indexing.cli.stopping import Stop, stop_on_signals
from hashseek.indexing.cli.vectors import add_vectors
from hashseek.indexing.collection import CATALOG, Collection
from hashseek.indexing.dry_run import dry_run as open_dry_run
from hashseek.indexing.fit_options import FeatureNetwork
from hashseek.indexing.fitting import Fitting, fit_to_sources, plan_collection, refit_may_help
from hashseek.indexing.index.hamming_index import SLOW_TO_BUILD
from hashseek.indexing.ingest.batch import IngestReport, ingest
from hashseek.indexing.ingest.loading import Fetch
from hashseek.indexing.ingest.sources import Found, KeyFrom, count_images, describe, find_sources, images_in
from hashseek.indexing.ingest.watching import Watch
from hashseek.indexing.kept_files import FILES
from hashseek.indexing.maintenance.exchange import add_exports
from hashseek.indexing.milvus_uri import is_in_milvus, parse_uri
from hashseek.indexing.opening import Store, open_for_adding
from hashseek.indexing.printing import counted
from hashseek.indexing.ray_encoding import Cluster, encode_shards
from hashseek.indexing.remote import MAX_BYTES, SECONDS, fetch, is_remote
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.devices import EncoderOptions
from hashseek.retrieval.encoder import Encoder
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.label_files import OnError


def add(
    context: typer.Context,
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
        typer.Option(
            help="Ids of the vectors of an .npy file: a .txt file with one per line, or a list with a column id."
        ),
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
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="A label of every new image; replaces the labels of a stored image with a key. May be repeated."
        ),
    ] = None,
    key_from: Annotated[
        KeyFrom | None,
        typer.Option(help="Use this as the key of images without one, so that changed files update their records."),
    ] = None,
    on_error: Annotated[OnError, typer.Option(help="What to do if an image cannot be used.")] = "skip",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 3 if an image was skipped.")] = False,
    errors: Annotated[Path | None, typer.Option(help="Write every problem to this file, as JSON lines.")] = None,
    trust_mtime: Annotated[
        bool,
        typer.Option(
            "--trust-mtime",
            help="Skip files with unchanged size and modification time, unless labels, attributes or a key are new.",
        ),
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
    every: Annotated[float, typer.Option(min=0.1, help="With --watch: seconds between two checks, or longer.")] = 2.0,
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
            help="Encode on a Ray cluster: local (start one here) or the HOST:PORT of a running one.",
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
    turns the features of a pretrained network into codes. For vectors, it is fitted to the vectors themselves.

    Exit codes: 0 if images were stored (now or earlier), 1 if there were none to store, 2 if the command failed,
    3 with --strict if an image was skipped, 130 or 143 if the command was stopped.
    """
    _refuse_combinations(collection, given_options(context))
    fit = fit_options(bits, backbone, weights, preprocessing)
    cluster = None if ray is None else Cluster(ray, ray_workers, ray_cpus, ray_gpus)
    if cluster is not None:
        cluster.check()
    options = encoder_options(device, precision, engine)
    get = partial(fetch, allow_private=allow_private, max_bytes=url_megabytes * 2**20, seconds=url_seconds)
    labels, is_new = label or [], not (collection / CATALOG).is_file()
    if fit and not is_new:
        fit.check_agrees(collection)
    if vectors is not None:
        add_vectors(
            collection, vectors, ids, bits=fit.bits, checkpoint=checkpoint, keep_features=keep_features, labels=labels
        )
        return
    sources = _Sources(paths or [], watch, split, labels, key_from, on_error)
    sources.check()
    started = time.monotonic()
    with ExitStack() as stack:
        output = Output(stack.enter_context(errors.open("w", encoding="utf-8")) if errors else None)
        n_total = None if watch else sources.total(output)
        plan = plan_collection(collection, fit, sources.found()) if is_new and checkpoint is None else None
        if dry_run:
            report = _dry_run(collection, checkpoint, sources, get, output, n_total, trust_mtime=trust_mtime)
            _exit_with_code(report, strict=strict)
            return
        first = None if plan is None else _fit(sources, plan, get, output, options)
        with nullcontext(checkpoint) if first is None else first.checkpoint() as made:
            # Shards that are encoded already need the same fit again.
            keep_empty = first is not None and cluster is not None
            opened = stack.enter_context(
                open_for_adding(collection, checkpoint=made, keep_features=keep_features, keep_empty=keep_empty)
            )
        encoder = None if first is None else first.encoder
        if encoder is None and cluster is None:
            encoder = Searcher.open(opened, **options).image_encoder
        stop = stack.enter_context(stop_on_signals())
        run = _Run(opened, sources, encoder, first, get, output, n_total, stop)
        if watch:
            report = run.follow_folders(prune=prune, every=every)
        elif cluster is not None:
            report = run.encode_on(cluster, options, shards, shard_size)
        else:
            report = run.add_all(trust_mtime=trust_mtime)
        opened.save_index()
        seconds = f"; {time.monotonic() - started:.1f} s" if first is not None else ""
        typer.echo(f"{_outcome(report)}; {opened.place} holds {counted(len(opened), 'image')}{seconds}")
        stop.exit_if_set()
        _suggest(opened, is_new=first is not None)
    _exit_with_code(report, strict=strict)


_URLS = ("--allow-private", "--url-megabytes", "--url-seconds")
_NOT_FOR_WATCH = ("--dry-run", "--split", "--key-from", "--trust-mtime", "--strict", *_URLS)
_NETWORK = ("--backbone", "--weights", "--preprocessing")
_NOT_WITH = {
    "--watch": _NOT_FOR_WATCH,
    "--ray": ("--vectors", "--watch", "--dry-run", "--trust-mtime", "--keep-features", "--on-error"),
    "--vectors": (
        "paths",
        "--watch",
        *_NOT_FOR_WATCH,
        *_NETWORK,
        *ENCODING,
        "--on-error",
        "--errors",
    ),
    "--checkpoint": ("--bits", *_NETWORK),
}


def _refuse_combinations(collection: Path, given: Container[str]) -> None:
    """Refuse options that do not go together; `given`: their names."""
    refuse_without(["--watch"], ["--prune", "--every"], given)
    refuse_without(["--ray"], ["--ray-workers", "--ray-cpus", "--ray-gpus", "--shards", "--shard-size"], given)
    refuse_without(["--vectors"], ["--ids"], given)
    if "--vectors" not in given and "paths" not in given:
        raise BadConfig("nothing to add: pass images, or vectors with --vectors")
    for option, others in _NOT_WITH.items():
        if option in given:
            refuse(option, others, given)
    if is_in_milvus(collection):
        uri = parse_uri(collection)
        refuse(f"the collection {uri}", ["--watch", "--dry-run"], given)
        if "--checkpoint" not in given:
            raise BadConfig(f"{uri} stores no checkpoint: pass the file it was created with (--checkpoint)")


@dataclass(frozen=True)
class _Sources:
    """The images that the command names."""

    paths: list[str]
    watch: bool
    split: str | None
    labels: list[str]
    key_from: KeyFrom | None
    on_error: OnError

    def check(self) -> None:
        """Refuse paths that do not exist, and for --watch those that are not folders."""
        for path in self.paths:
            if self.watch and not Path(path).is_dir():
                raise BadConfig(f"{path} is not a folder: --watch needs folders")
        find_sources(self.paths, split=self.split)

    def found(self) -> Iterator[Found]:
        """The images with their labels and keys, and problems; each call finds them again."""
        if self.watch:  # as `Watch` finds them: it reads no lists, and paths are keys
            images = (found for path in self.paths for found in images_in(Path(path)))
            return describe(images, labels=self.labels, key_from="path")
        return describe(find_sources(self.paths, split=self.split), labels=self.labels, key_from=self.key_from)

    def total(self, output: Output) -> int | None:
        """Their number, if needed for a progress bar, or for --on-error stop, which refuses bad lists early."""
        if not output.is_terminal and self.on_error == "skip":
            return None
        return count_images(self.paths, split=self.split, on_error=self.on_error)


@dataclass(frozen=True)
class _Run:
    """Adds the images to an open collection, in one of three ways, until they are added or a signal asks to stop.

    Args:
        encoder: None if the workers of a cluster encode.
        first: the fit of a new collection, with the images that were encoded for it.
        n_total: the number of images, if known.
    """

    collection: Store
    sources: _Sources
    encoder: Encoder | None
    first: Fitting | None
    fetch: "partial[bytes]"
    output: Output
    n_total: int | None
    stop: Stop

    def add_all(self, *, trust_mtime: bool) -> IngestReport:
        """Encode the images here and add them."""
        with closing(self._ingest(self.sources.found(), trust_mtime=trust_mtime)) as reports:
            return self.output.follow(reports, self.n_total)

    def encode_on(
        self, cluster: Cluster, options: EncoderOptions, shards: Path | None, shard_size: int
    ) -> IngestReport:
        """Encode the images on a cluster, into files in the folder `shards`, and add those."""
        place = self.collection.place
        if self.collection.keeps_features:
            raise BadConfig(f"{place} stores features, which --ray does not support: leave out --ray")
        folder = shards or Path(f"{parse_uri(place).name if is_in_milvus(place) else place}.shards")
        with self.output.progress("encoding") as show:
            files = encode_shards(
                self.sources.found(),
                folder,
                collection=self.collection,
                cluster=cluster,
                options=options,
                fetch=self.fetch,
                shard_size=shard_size,
                stopped=self.stop.is_set,
                progress=lambda done, more: show(done, self.n_total, more),
            )
        if files:
            typer.echo(f"{folder}: {counted(len(files), 'shard')}")
        with closing(add_exports(self.stop.until_set(files), self.collection)) as reports:
            return self.output.follow(reports, self.n_total)

    def follow_folders(self, *, prune: bool, every: float) -> IngestReport:
        """Keep the collection in sync with the folders until stopped; returns the sum of all rounds."""
        collection, total = self.collection, IngestReport()
        assert isinstance(collection, Collection)
        folders, own_files = [Path(path) for path in self.sources.paths], collection.folder / FILES
        watch = Watch(collection.catalog, folders, ignore=own_files, labels=self.sources.labels)
        while True:
            started = time.monotonic()
            report, deleted, rest = IngestReport(), list[int](), every
            try:
                with closing(self._ingest(watch.changes())) as reports:
                    for report in reports:
                        self.output.show(report.problems)
                        watch.settle(report)
                if not report.done:  # looking through very many files takes long: it may take a quarter of the time
                    rest = max(every, 3 * (time.monotonic() - started))
                if prune and not self.stop.is_set() and (deleted := watch.deleted()):
                    collection.remove(deleted, missing_ok=True)
                    report.removed = len(deleted)
                if not total.done and report.done:  # for a new collection, other processes would build it each time
                    collection.save_index()
                elif collection.kind not in SLOW_TO_BUILD:  # this process does not search
                    collection.merge_segments()
            except CatalogLocked as error:  # the next round finds what is still missing
                typer.echo(str(error), err=True)
            if report.done or report.removed:
                typer.echo(f"{_outcome(report)}; {collection.folder} holds {counted(len(collection), 'image')}")
            total = total.plus(report)
            if self.stop.wait(rest):
                return total

    def _ingest(self, sources: Iterable[Found], *, trust_mtime: bool = False) -> Generator[IngestReport, None, None]:
        assert self.encoder is not None
        found = self.stop.until_set(sources)
        images = found if self.first is None else self.first.reuse(found)
        return ingest(
            self.collection,
            self.encoder,
            images,
            on_error=self.sources.on_error,
            trust_mtime=trust_mtime,
            fetch=self.fetch,
        )


def _fit(
    sources: _Sources, plan: tuple[FeatureNetwork, int], get: Fetch, output: Output, options: EncoderOptions
) -> Fitting:
    """The hash layer for a new collection, fitted to the images."""
    with fit_progress(output) as progress:
        first = fit_to_sources(
            sources.found(), *plan, on_error=sources.on_error, fetch=get, progress=progress, **options
        )
    print_fit(first)
    return first


def _suggest(collection: Store, *, is_new: bool) -> None:
    """Print the two commands that come next; for an older collection, recommend a refit if that may help."""
    if is_new:
        path = next((image.path for image in collection.browse(None, limit=1).images), "")
        if path:
            print_next(collection.place, "PICTURE.jpg" if is_remote(path) else shlex.quote(path))
        return
    header = load_header(collection.checkpoint)
    if isinstance(collection, Collection) and refit_may_help(header, len(collection)):
        typer.echo(
            f"the hash layer was fitted to only {header.training['fit']['n_images']:,} images: for better results, "
            f"refit it with `hashseek index refit {shlex.quote(collection.place)}`"
        )


def _dry_run(
    folder: Path,
    checkpoint: Path | None,
    sources: _Sources,
    get: Fetch,
    output: Output,
    n_total: int | None,
    *,
    trust_mtime: bool,
) -> IngestReport:
    """Print what would happen."""
    with open_dry_run(folder, checkpoint=checkpoint) as (target, stand_in):
        reports = ingest(
            target, stand_in, sources.found(), on_error=sources.on_error, trust_mtime=trust_mtime, fetch=get
        )
        n_images = len(target)
        report = output.follow(reports, n_total)
    outcome = _outcome(report, prefix="would be ")
    typer.echo(f"dry run: {outcome}; nothing was written; {folder} holds {counted(n_images, 'image')}")
    return report


def _exit_with_code(report: IngestReport, *, strict: bool) -> None:
    if report.added + report.updated + report.known == 0:
        raise typer.Exit(1)
    if strict and report.skipped:
        raise typer.Exit(3)


def _outcome(report: IngestReport, prefix: str = "") -> str:
    updated = f"{prefix}updated {report.updated}, " if report.updated else ""
    removed = f", removed {report.removed}" if report.removed else ""
    return f"{prefix}added {report.added}, {updated}already stored {report.known}, skipped {report.skipped}{removed}"
