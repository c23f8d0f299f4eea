"""The subcommands of `index` that maintain a collection: snapshot, restore, export, reencode, verify, ..."""

import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from hashseek.indexing.calibration import N_QUERIES, calibrate_collection
from hashseek.indexing.cli.options import (
    ENCODING,
    AllowPrivate,
    CollectionArgument,
    Device,
    Engine,
    Precision,
    StoreArgument,
    encoder_options,
    given_options,
    refuse,
    refuse_without,
)
from hashseek.indexing.cli.output import N_SHOWN, Output
from hashseek.indexing.collection import Collection
from hashseek.indexing.maintenance.backup import Contents, restore, snapshot
from hashseek.indexing.maintenance.exchange import export, import_
from hashseek.indexing.maintenance.optimize import optimize
from hashseek.indexing.maintenance.recheck import recheck
from hashseek.indexing.maintenance.reencode import Reencoded, drop_space, reencode, switch_space
from hashseek.indexing.maintenance.repair import repair as repair_collection
from hashseek.indexing.milvus_uri import is_in_milvus, parse_uri
from hashseek.indexing.printing import counted, printable
from hashseek.indexing.searcher import Searcher
from hashseek.retrieval.devices import EncoderOptions
from hashseek.retrieval.errors import BadConfig

app = typer.Typer()

DropOld = Annotated[bool, typer.Option("--drop-old", help="Delete the old codes after the switch.")]
WithoutMissing = Annotated[
    bool, typer.Option("--without-missing", help="Switch even if some images cannot be encoded.")
]
SpaceArgument = Annotated[int, typer.Argument(help="Number of the code space; `index stats` shows them.")]


@app.command("snapshot")
def snapshot_command(
    collection: CollectionArgument, file: Annotated[Path, typer.Argument(help="New file to write.")]
) -> None:
    """Write a collection to one file: catalog, checkpoints and kept files. The collection may be in use."""
    with closing(Collection(collection)) as opened:
        contents = snapshot(opened, file)
    typer.echo(f"{file}: {counted(contents.n_images, 'image')}")
    _warn_of_losses(contents, "is missing or damaged and is not in the snapshot")


@app.command("restore")
def restore_command(
    file: Annotated[Path, typer.Argument(help="A snapshot.")],
    collection: Annotated[Path, typer.Argument(help="A new or empty folder.")],
) -> None:
    """Create a collection from a snapshot, in a new folder. Every byte is checked first."""
    contents = restore(file, collection)
    typer.echo(f"{collection} holds {counted(contents.n_images, 'image')}, as of {contents.created_at}")
    _warn_of_losses(contents, "was missing or damaged when the snapshot was taken")


def _warn_of_losses(contents: Contents, reason: str) -> None:
    """Name the files missing from a snapshot, and exit with code 1 if there are any."""
    if contents.lost:
        _print_some([f"{name} {reason}" for name in contents.lost])
        raise typer.Exit(1)


@app.command("optimize")
def optimize_command(collection: CollectionArgument) -> None:
    """Compact the index and the catalog, and delete files that no image needs. The collection may be in use."""
    with closing(Collection(collection)) as opened:
        done = optimize(opened)
        n_images = len(opened)
    typer.echo(
        f"{counted(n_images, 'image')}; merged {done.n_merged} new and dropped {done.n_removed} removed rows of the "
        f"index, deleted {counted(done.n_deleted, 'file')}"
    )


@app.command("export")
def export_command(
    collection: CollectionArgument, file: Annotated[Path, typer.Argument(help="New Parquet file to write.")]
) -> None:
    """Write all records and codes, without the image files, to a Parquet file."""
    if file.suffix.lower() != ".parquet":
        raise BadConfig(f"an export is a Parquet file, but {file} does not end in .parquet: rename it")
    with closing(Collection(collection, read_only=True)) as opened:
        n_images, n_without_code = export(opened, file)
    typer.echo(f"{file}: {counted(n_images, 'image')}")
    if n_without_code:
        typer.echo(
            f"{n_without_code} of them have no code, so the file cannot be imported: run "
            f"`hashseek index verify {shlex.quote(str(collection))} --repair` to encode them, or remove "
            "those whose files are gone; then export again",
            err=True,
        )


@app.command("import")
def import_command(
    file: Annotated[
        Path, typer.Argument(help="A Parquet file from `index export`, or a folder from `index add --ray`.")
    ],
    collection: StoreArgument,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The checkpoint that computed the codes; required for a new collection.")
    ] = None,
) -> None:
    """Add the images of an export without encoding them. Running it again adds nothing twice."""
    with closing(import_(file, collection, checkpoint=checkpoint)) as reports:
        done = Output().follow(reports, None)
    counts = f"added {done.added}, updated {done.updated}, already stored {done.known}"
    typer.echo(f"{counts}; from {file} into {parse_uri(collection) if is_in_milvus(collection) else collection}")


@app.command("reencode")
def reencode_command(
    collection: CollectionArgument,
    checkpoint: Annotated[Path, typer.Option(help="The new checkpoint.")],
    drop_old: DropOld = False,
    without_missing: WithoutMissing = False,
    allow_private: AllowPrivate = False,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "auto",
) -> None:
    """Re-encode all images with another checkpoint, then switch to it. If interrupted, run the same command again.

    Exits with code 1, without switching, if some images cannot be encoded.
    """
    options = encoder_options(device, precision, engine)
    with closing(Collection(collection)) as opened:
        steps = reencode(opened, checkpoint, without_missing=without_missing, allow_private=allow_private, **options)
        follow_change(opened, steps, drop_old=drop_old)


def follow_change(collection: Collection, steps: Iterator[Reencoded], *, drop_old: bool) -> None:
    """Change the codes and show the progress; exits with code 1 if searches still use the old ones."""
    folder, old = shlex.quote(str(collection.folder)), collection.catalog.space
    report = next(steps, None)
    if report is None:
        others = [str(space.id) for space in collection.catalog.spaces.all() if space.id != old.id]
        drop = (
            f"; `hashseek index drop-space {folder} SPACE` deletes other codes: {', '.join(others)}" if others else ""
        )
        typer.echo(f"{folder} already uses this checkpoint: no code was changed{drop}")
        return
    with Output().progress("encoding") as progress:
        for report in steps:
            progress(report.encoded + report.truncated + len(report.failed), report.total)
    if report.switched and drop_old:
        drop_space(collection, old.id)
    _print_some(list(report.failed.values()))
    truncated = f", truncated {report.truncated} longer codes" if report.truncated else ""
    failed = f", {len(report.failed)} failed" if report.failed else ""
    done = f"encoded {report.encoded}{truncated}{failed}"
    if not report.switched:
        typer.echo(
            f"{done}; not switched: restore the files and run this again, or add --without-missing to leave them out"
        )
        raise typer.Exit(1)
    kept = "deleted" if drop_old else f"kept: delete it with `hashseek index drop-space {folder} {old.id}`"
    typer.echo(f"{done}; {folder} now uses {report.space.n_bits} bits (space {report.space.id}); space {old.id} {kept}")


@app.command("switch")
def switch_command(collection: CollectionArgument, space: SpaceArgument) -> None:
    """Search with the codes of another space, such as the one before `reencode`."""
    with closing(Collection(collection)) as opened:
        chosen = switch_space(opened, space)
    typer.echo(f"{collection} now uses {chosen.n_bits} bits of checkpoint {chosen.fingerprint[:12]} (space {space})")


@app.command("drop-space")
def drop_space_command(collection: CollectionArgument, space: SpaceArgument) -> None:
    """Delete the codes and the checkpoint of a space that is not in use."""
    with closing(Collection(collection)) as opened:
        drop_space(opened, space)
    typer.echo(f"deleted space {space} of {collection}")


@app.command()
def verify(
    context: typer.Context,
    collection: CollectionArgument,
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair what can be repaired; exit with code 1 if problems remain.")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="With --repair: another copy of a checkpoint of the collection.")
    ] = None,
    codes: Annotated[int, typer.Option(min=0, help="Re-encode this many random images and compare their codes.")] = 0,
    allow_private: AllowPrivate = False,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "auto",
) -> None:
    """Check that catalog, codes, index, checkpoint and image files agree; exit with code 1 if they do not."""
    options, given = encoder_options(device, precision, engine), given_options(context)
    refuse_without(["--repair"], ["--checkpoint"], given)
    refuse_without(["--codes", "--repair"], ["--allow-private", *ENCODING], given)
    if repair:
        refuse("--repair", ["--codes"], given)
        _repair(collection, checkpoint, options, allow_private=allow_private)
        return
    with closing(Collection(collection, read_only=True)) as opened:
        problems = opened.verify()
        n_images = len(opened)
        for problem in problems:
            typer.echo(printable(problem))
        if codes and n_images:
            encoder = Searcher.open(opened, **options).image_encoder
            differ, wrong = recheck(opened, encoder, codes, allow_private=allow_private)
            problems += wrong
            for problem in wrong:
                typer.echo(printable(problem))
            typer.echo(
                f"{counted(len(differ), 'image')} encoded again by {encoder.engine}: {sum(differ)} of "
                f"{len(differ) * opened.n_bits} bits differ, in one image at most {max(differ, default=0)}"
            )
    typer.echo(f"{counted(n_images, 'image')}, {counted(len(problems), 'problem')}")
    if problems:
        raise typer.Exit(1)


def _repair(collection: Path, checkpoint: Path | None, options: EncoderOptions, *, allow_private: bool) -> None:
    """Repair, print what was done and what remains; exit with code 1 if anything remains."""
    report = repair_collection(collection, checkpoint=checkpoint, allow_private=allow_private, **options)
    for line in report.done:
        typer.echo(printable(line))
    _print_some(report.left)
    typer.echo(f"{counted(len(report.done), 'repair')}, {counted(len(report.left), 'problem')} left")
    if report.left:
        raise typer.Exit(1)


@app.command()
def calibrate(
    collection: CollectionArgument,
    labels: Annotated[
        list[str] | None, typer.Option(help="Only these labels decide relevance; may be repeated; default: all labels.")
    ] = None,
    queries: Annotated[
        int, typer.Option(min=1, help="Number of labelled images, chosen at random, to use as queries.")
    ] = N_QUERIES,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random choice.")] = 0,
) -> None:
    """Measure, on the labelled images, the precision of results at each distance, for `search --min-precision`."""
    with closing(Collection(collection)) as opened:
        stored = calibrate_collection(opened, labels=labels or (), n_queries=queries, seed=seed)
    found = stored.calibration
    names = printable(", ".join(stored.labels))
    typer.echo(f"{found.n_queries} queries over {stored.n_images} labelled images, labels {names}")
    typer.echo("precision  radius")
    for precision in (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5):
        radius = found.radius(precision)
        typer.echo(f"{precision:9.2f}  {'not reached' if radius is None else radius}")


def _print_some(problems: list[str]) -> None:
    for problem in problems[:N_SHOWN]:
        typer.echo(printable(problem), err=True)
    if len(problems) > N_SHOWN:
        typer.echo(f"and {len(problems) - N_SHOWN} more", err=True)
