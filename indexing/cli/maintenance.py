"""Subcommands of `index` for whoever keeps a collection: snapshot, restore, optimize, export, import, reencode, ..."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hashseek.indexing.cli.options import Device, Engine, Precision
from hashseek.indexing.collection import Collection
from hashseek.indexing.maintenance.backup import Contents, restore, snapshot
from hashseek.indexing.maintenance.exchange import export, import_
from hashseek.indexing.maintenance.optimize import optimize
from hashseek.indexing.maintenance.reencode import Reencoded, drop_space, reencode, switch_space
from hashseek.indexing.maintenance.repair import repair
from hashseek.indexing.printing import printable

app = typer.Typer()

CollectionArgument = Annotated[Path, typer.Argument(help="Folder of the collection.")]
SpaceArgument = Annotated[int, typer.Argument(help="Number of the code space; `index stats` shows them.")]
N_SHOWN = 20  # problems of one kind; the others are counted


@app.command("snapshot")
def snapshot_command(
    collection: CollectionArgument, file: Annotated[Path, typer.Argument(help="New file to write.")]
) -> None:
    """Write a collection to one file while it is used: catalog, checkpoints and kept files, as of one moment."""
    with closing(Collection(collection)) as opened:
        contents = snapshot(opened, file)
    typer.echo(f"{file}: {contents.n_images} images, {_size(file.stat().st_size)}")
    _warn_of_losses(contents, "was missing or damaged already and is not in it")


@app.command("restore")
def restore_command(
    file: Annotated[Path, typer.Argument(help="A snapshot.")],
    collection: Annotated[Path, typer.Argument(help="A new or an empty folder.")],
) -> None:
    """Restore a collection from a snapshot into a new folder, every byte checked: all of it or nothing."""
    contents = restore(file, collection)
    typer.echo(f"{collection} holds {contents.n_images} images, as of {contents.created_at}")
    _warn_of_losses(contents, "was missing or damaged when the snapshot was taken")


def _warn_of_losses(contents: Contents, reason: str) -> None:
    """Name what a snapshot could not hold, and end with 1 if there is something."""
    if contents.lost:
        _some([f"{name} {reason}" for name in contents.lost])
        raise typer.Exit(1)


@app.command("optimize")
def optimize_command(collection: CollectionArgument) -> None:
    """Merge segments, drop what was removed, shrink the catalog, delete files that nobody needs; while it is used."""
    with closing(Collection(collection)) as opened:
        done = optimize(opened)
        n_images = len(opened)
    typer.echo(
        f"{n_images} images; merged {done.n_merged} new and dropped {done.n_removed} removed rows of the index, "
        f"deleted {done.n_deleted} files, {_size(done.n_bytes)} given back"
    )


@app.command("export")
def export_command(
    collection: CollectionArgument, file: Annotated[Path, typer.Argument(help="New Parquet file to write.")]
) -> None:
    """Write all records and codes to a Parquet file, as of one moment; the pictures are only named in it."""
    with closing(Collection(collection, read_only=True)) as opened:
        done = export(opened, file)
    typer.echo(f"{file}: {done.n_images} images, {_size(file.stat().st_size)}")
    if done.n_without_code:
        remedy = f"`hashseek index verify {collection} --repair` encodes them; then export again"
        typer.echo(f"{done.n_without_code} of them have no code, and no import takes the file: {remedy}", err=True)


@app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(help="A Parquet file that `index export` wrote.")],
    collection: CollectionArgument,
    checkpoint: Annotated[Path | None, typer.Option(help="That made the codes; needed for a new collection.")] = None,
) -> None:
    """Add the images of an export without encoding anything. Running it again adds nothing twice."""
    done = import_(file, collection, checkpoint=checkpoint)
    counts = ", ".join(f"{name} {done[name]}" for name in ("added", "updated", "known"))
    typer.echo(f"{counts.replace('known', 'already stored')}; from {file} into {collection}")


@app.command("reencode")
def reencode_command(
    collection: CollectionArgument,
    checkpoint: Annotated[Path, typer.Option(help="The new checkpoint.")],
    drop_old: Annotated[bool, typer.Option("--drop-old", help="Forget the old codes after the switch.")] = False,
    without_missing: Annotated[
        bool, typer.Option("--without-missing", help="Switch though searches will no longer find some images.")
    ] = False,
    allow_private: Annotated[
        bool, typer.Option("--allow-private", help="Fetch images from addresses that are not public, too.")
    ] = False,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "torch",
) -> None:
    """Change the model: encode all images with another checkpoint, then switch. Run again, it goes on where it stopped.

    Ends with 1, and without the switch, if images cannot be encoded.
    """
    with closing(Collection(collection)) as opened:
        old = opened.catalog.space
        steps = reencode(
            opened,
            checkpoint,
            device=device,
            precision=precision,
            engine=engine,
            without_missing=without_missing,
            allow_private=allow_private,
        )
        report = _with_bar(steps)
        if report.switched and drop_old:
            drop_space(opened.folder, old.id)
    _some(list(report.failed.values()))
    done = f"encoded {report.encoded}, cut {report.truncated} from longer codes, {len(report.failed)} lost"
    if not report.switched:
        typer.echo(
            f"{done}; not switched: bring the files back and run it again, or give them up with --without-missing"
        )
        raise typer.Exit(1)
    kept = "dropped" if drop_old else f"kept: drop it with `hashseek index drop-space {collection} {old.id}`"
    typer.echo(
        f"{done}; {collection} now uses {report.space.n_bits} bits (space {report.space.id}); space {old.id} {kept}"
    )


def _with_bar(steps: Iterator[Reencoded]) -> Reencoded:
    """Go through all steps with a progress bar, if somebody can see it; the last one."""
    report = next(steps)
    console = Console(stderr=True)
    with Progress(
        TextColumn("encoding"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("encoding", total=report.total)
        for report in steps:
            bar.update(task, completed=report.encoded + report.truncated + len(report.failed))
    return report


@app.command("switch")
def switch_command(collection: CollectionArgument, space: SpaceArgument) -> None:
    """Let searches use the codes of another space, such as the one before `reencode`."""
    chosen = switch_space(collection, space)
    typer.echo(f"{collection} now uses {chosen.n_bits} bits of checkpoint {chosen.fingerprint[:12]} (space {space})")


@app.command("drop-space")
def drop_space_command(collection: CollectionArgument, space: SpaceArgument) -> None:
    """Forget the codes of a space that searches do not use, and its checkpoint."""
    drop_space(collection, space)
    typer.echo(f"dropped space {space} of {collection}")


def repair_and_print(
    collection: Path, checkpoint: Path | None, device: str, precision: str, engine: str = "torch"
) -> None:
    """`index verify --repair`: mend, say what was done and what is left, and end with 1 if something is."""
    report = repair(collection, checkpoint=checkpoint, device=device, precision=precision, engine=engine)
    for line in report.done:
        typer.echo(printable(line))
    _some([str(finding) for finding in report.left])
    typer.echo(f"{len(report.done)} repairs, {len(report.left)} problems left")
    if report.left:
        raise typer.Exit(1)


def _some(problems: list[str]) -> None:
    for problem in problems[:N_SHOWN]:
        typer.echo(printable(problem), err=True)
    if len(problems) > N_SHOWN:
        typer.echo(f"and {len(problems) - N_SHOWN} more", err=True)


def _size(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} GB"
