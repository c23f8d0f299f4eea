"""Subcommands `index` (add, remove, stats, verify) and `search`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from indexing.collection import Collection, open_or_create
from indexing.ingest import Report, find_sources, ingest
from indexing.searcher import Searcher
from retrieval.errors import HashseekError
from retrieval.images import decode, read_bytes

app = typer.Typer(no_args_is_help=True)

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
    opened = open_or_create(collection, checkpoint=checkpoint)
    searcher = Searcher.open(opened, device=device, precision=precision)
    report = Report()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
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
        for report in ingest(opened, searcher.encoder, sources, on_error=on_error):
            done = report.added + report.known + len(report.skipped)
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, speed=f"{speed:.0f} images/s" if speed else "")
    opened.save_index()
    for problem in [*problems, *report.problems]:
        console.print(f"{'skipped' if problem.skipped else 'note'}: {problem}", markup=False)
    n_skipped = sum(problem.skipped for problem in [*problems, *report.problems])
    typer.echo(
        f"added {report.added}, already stored {report.known}, skipped {n_skipped}; "
        f"{collection} holds {len(opened)} images"
    )
    opened.close()
    if report.added + report.known == 0:
        raise typer.Exit(1)


@app.command()
def remove(collection: CollectionArgument, ids: Annotated[list[int], typer.Argument(help="Ids of images.")]) -> None:
    """Remove images from a collection: all of the ids, or none if one of them is not there."""
    opened = Collection(collection)
    opened.remove(list(dict.fromkeys(ids)))
    opened.save_index()
    typer.echo(f"removed {len(set(ids))}; {collection} holds {len(opened)} images")
    opened.close()


@app.command()
def stats(
    collection: CollectionArgument, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False
) -> None:
    """Say what a collection holds."""
    opened = Collection(collection, read_only=True)
    content = {
        "images": len(opened),
        "bits": opened.n_bits,
        "fingerprint": opened.fingerprint,
        "index": opened.describe_index(),
        "labels": opened.catalog.label_counts(),
    }
    opened.close()
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    for key, value in content.items():
        shown = ", ".join(f"{name} {number}" for name, number in value.items()) if isinstance(value, dict) else value
        typer.echo(f"{key:12} {shown}")


@app.command()
def verify(collection: CollectionArgument) -> None:
    """Check that catalog, codes, index, checkpoint and image files agree; exits with 1 if they do not."""
    opened = Collection(collection, read_only=True)
    problems = opened.verify()
    for problem in problems:
        typer.echo(problem)
    typer.echo(f"{len(opened)} images, {len(problems)} problems")
    opened.close()
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
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Find the stored images most similar to a picture, nearest first."""
    opened = Collection(collection, read_only=True)
    try:
        picture = decode(read_bytes(image), name=str(image))
        searcher = Searcher.open(opened, checkpoint=checkpoint, device=device, precision=precision)
        [answer] = searcher.search([picture.image], k=k, max_distance=max_distance)
    except HashseekError:
        opened.close()
        raise
    opened.close()
    if as_json:
        hits = [{"rank": hit.rank, "distance": hit.distance, **asdict(hit.image)} for hit in answer.hits]
        typer.echo(json.dumps({"n_bits": opened.n_bits, "fingerprint": opened.fingerprint, "hits": hits}, indent=2))
        return
    table = Table("rank", "bits", "id", "path", "labels", box=None, pad_edge=False)
    for hit in answer.hits:
        table.add_row(str(hit.rank), str(hit.distance), str(hit.image.id), hit.image.path, "; ".join(hit.image.labels))
    Console(soft_wrap=True, highlight=False, markup=False).print(table)
