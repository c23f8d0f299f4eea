"""Subcommands `index` (add, remove, build, duplicates, stats, verify) and `search`."""

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from indexing.collection import Collection, open_or_create
from indexing.ingest import Report, Source, find_sources, ingest
from indexing.printing import printable
from indexing.searcher import Answer, Searcher, check_limits
from retrieval.images import read_bytes
from retrieval.listing import OnError

app = typer.Typer()

CollectionArgument = Annotated[Path, typer.Argument(help="Folder of the collection.")]
Precision = Annotated[Literal["auto", "fp32", "bf16"], typer.Option(help="Of the network.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


@app.command()
def add(
    collection: CollectionArgument,
    paths: Annotated[list[Path], typer.Argument(help="Image files, folders, or lists (labels.csv, .jsonl).")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Needed for a new collection; of an existing one it must be the same.")
    ] = None,
    split: Annotated[
        Literal["query", "train", "database"] | None, typer.Option(help="Of a list, add only this split.")
    ] = None,
    on_error: Annotated[Literal["skip", "stop"], typer.Option(help="Leave bad images out, or stop at one.")] = "skip",
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Add images to a collection. Running it again goes on where it stopped: nothing is stored twice."""
    sources, problems = find_sources(paths, on_error=on_error, split=split)
    with closing(open_or_create(collection, checkpoint=checkpoint)) as opened:
        searcher = Searcher.open(opened, device=device, precision=precision)
        report = _add(opened, searcher, sources, on_error)
        opened.save_index()
        n_images = len(opened)
    problems += report.problems
    for problem in problems:
        typer.echo(f"{'skipped' if problem.skipped else 'note'}: {printable(str(problem))}", err=True)
    n_skipped = sum(problem.skipped for problem in problems)
    outcome = f"added {report.added}, already stored {report.known}, skipped {n_skipped}"
    typer.echo(f"{outcome}; {collection} holds {n_images} images")
    if report.added + report.known == 0:
        if not problems:
            typer.echo("hashseek: there is no image in what was named", err=True)
        raise typer.Exit(1)


def _add(collection: Collection, searcher: Searcher, sources: list[Source], on_error: OnError) -> Report:
    """Ingest with a progress bar, if somebody can see it."""
    report = Report()
    console = Console(stderr=True)
    with Progress(
        TextColumn("adding"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("adding", total=len(sources), speed="")
        for report in ingest(collection, searcher.encoder, sources, on_error=on_error):
            done = report.added + report.known + len(report.skipped)
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, speed=f"{speed:.0f} images/s" if speed else "")
    return report


@app.command()
def remove(collection: CollectionArgument, ids: Annotated[list[int], typer.Argument(help="Ids of images.")]) -> None:
    """Remove images from a collection: all of the ids, or none if one of them is not there."""
    with closing(Collection(collection)) as opened:
        opened.remove(list(dict.fromkeys(ids)))
        opened.save_index()
        typer.echo(f"removed {len(set(ids))}; {collection} holds {len(opened)} images")


@app.command()
def build(
    collection: CollectionArgument,
    kind: Annotated[
        Literal["exact", "ivf", "hnsw", "multihash", "gpu"],
        typer.Option(help="exact and gpu compare every code; the others may miss some of the nearest."),
    ] = "exact",
) -> None:
    """Build the index anew, of this kind; it stays of this kind until another is asked for."""
    with closing(Collection(collection)) as opened:
        opened.build_index(kind)
        typer.echo(_line(opened.describe_index()))


@app.command()
def stats(
    collection: CollectionArgument, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False
) -> None:
    """Say what a collection holds."""
    with closing(Collection(collection, read_only=True)) as opened:
        content = {
            "images": len(opened),
            "bits": opened.n_bits,
            "fingerprint": opened.fingerprint,
            "index": opened.describe_index(),
            "labels": opened.catalog.label_counts(),
        }
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    for key, value in content.items():
        shown = _line(value) if isinstance(value, dict) else value
        typer.echo(f"{key:12} {printable(str(shown))}")


def _line(content: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in content.items())


@app.command()
def duplicates(
    collection: CollectionArgument,
    radius: Annotated[int, typer.Option(help="Bits by which neighbours in a group may differ; 0: equal codes.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list per group and line.")] = False,
) -> None:
    """Print groups of near-duplicates, one block each: images linked by steps of at most so many bits."""
    with closing(Collection(collection, read_only=True)) as opened:
        for ids in opened.duplicates(radius=radius):
            records = [image for image in opened.catalog.get(ids.tolist()) if image is not None]
            if as_json:
                typer.echo(json.dumps([{"id": image.id, "path": image.path} for image in records]))
            else:
                lines = [f"{image.id}  {printable(image.path)}" for image in records]
                typer.echo("\n".join(lines) + "\n")


@app.command()
def verify(collection: CollectionArgument) -> None:
    """Check that catalog, codes, index, checkpoint and image files agree; exits with 1 if they do not."""
    with closing(Collection(collection, read_only=True)) as opened:
        problems = opened.verify()
        n_images = len(opened)
    for problem in problems:
        typer.echo(printable(problem))
    typer.echo(f"{n_images} images, {len(problems)} problems")
    if problems:
        raise typer.Exit(1)


def search(
    collection: CollectionArgument,
    image: Annotated[Path, typer.Argument(help="The picture to search with.")],
    k: Annotated[int, typer.Option("-k", help="Number of results.")] = 10,
    max_distance: Annotated[int | None, typer.Option(help="Leave out what is further away (bits).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Another file of the collection's checkpoint; default: its own copy.")
    ] = None,
    effort: Annotated[
        int | None, typer.Option(help="Of an approximate index, how hard to look; `index stats` shows some values.")
    ] = None,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Find the stored images most similar to a picture, nearest first."""
    check_limits(k, max_distance)
    with closing(Collection(collection, read_only=True)) as opened:
        data = read_bytes(image)
        searcher = Searcher.open(opened, checkpoint=checkpoint, device=device, precision=precision)
        picture = searcher.decode(data, name=str(image))
        [answer] = searcher.search([picture.image], k=k, max_distance=max_distance, effort=effort)
    if as_json:
        hits = [{"rank": hit.rank, "distance": hit.distance, **asdict(hit.image)} for hit in answer.hits]
        typer.echo(json.dumps({"n_bits": opened.n_bits, "fingerprint": opened.fingerprint, "hits": hits}, indent=2))
    else:
        typer.echo(_table(answer))


def _table(answer: Answer) -> str:
    """Rank, distance in bits, id, path and labels of each hit, in columns that no terminal's width cuts off."""
    rows = [("rank", "bits", "id", "path", "labels")]
    for hit in answer.hits:
        path, labels = printable(hit.image.path), printable("; ".join(hit.image.labels))
        rows.append((str(hit.rank), str(hit.distance), str(hit.image.id), path, labels))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
