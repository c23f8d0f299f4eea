"""Subcommands `index` (add, remove, build, duplicates, stats, verify) and `search`."""

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hashseek.indexing.catalog.filters import make_filter
from hashseek.indexing.catalog.records import Space
from hashseek.indexing.cli.add import add
from hashseek.indexing.cli.calibrate import calibrate
from hashseek.indexing.cli.maintenance import app as upkeep
from hashseek.indexing.cli.maintenance import repair_and_print
from hashseek.indexing.cli.options import Device, Engine, Precision
from hashseek.indexing.collection import Collection
from hashseek.indexing.maintenance.recheck import recheck
from hashseek.indexing.printing import printable
from hashseek.indexing.searcher import Answer, Searcher, check_limits
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import read_bytes

app = typer.Typer()
app.add_typer(upkeep)
app.command()(add)
app.command()(calibrate)

CollectionArgument = Annotated[Path, typer.Argument(help="Folder of the collection.")]


@app.command()
def remove(
    collection: CollectionArgument,
    ids: Annotated[list[int] | None, typer.Argument(help="Ids of images.")] = None,
    key: Annotated[list[str] | None, typer.Option(help="Key of an image; may be repeated.")] = None,
) -> None:
    """Remove images from a collection: all that are named, or none if one of them is not there."""
    if not ids and not key:
        raise BadConfig("name the images to remove, by their ids or with --key")
    with closing(Collection(collection)) as opened:
        named = dict.fromkeys([*(ids or []), *(opened.catalog.by_key(name).id for name in key or [])])
        opened.remove(list(named))
        opened.save_index()
        typer.echo(f"removed {len(named)}; {collection} holds {len(opened)} images")


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

        def state_of(space: Space) -> str:
            return "in use" if space.id == opened.catalog.space.id else space.state

        content = {
            "images": len(opened),
            "bits": opened.n_bits,
            "fingerprint": opened.fingerprint,
            "index": opened.describe_index(),
            "spaces": {
                str(space.id): f"{space.fingerprint[:12]} ({space.n_bits} bits, {state_of(space)})"
                for space in opened.catalog.spaces.all()
            },
            "engines": {name or "unknown": n for name, n in opened.catalog.spaces.engines().items()},
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
                typer.echo(json.dumps([{"id": image.id, "key": image.key, "path": image.path} for image in records]))
            else:
                lines = [f"{image.id}  {printable(image.path)}" for image in records]
                typer.echo("\n".join(lines) + "\n")


@app.command()
def verify(
    collection: CollectionArgument,
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what can be mended; exits with 1 if something is left.")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="For --repair: another file of the collection's checkpoint.")
    ] = None,
    codes: Annotated[
        int, typer.Option(min=0, help="Encode so many random images again and compare their codes; 0: none.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of these images.")] = 0,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "torch",
) -> None:
    """Check that catalog, codes, index, checkpoint and image files agree; exits with 1 if they do not."""
    encoding = {"--device": device != "auto", "--precision": precision != "auto", "--engine": engine != "torch"}
    _check_together(repair=repair, checkpoint=checkpoint, codes=codes, seed=seed, encoding=encoding)
    if repair:
        repair_and_print(collection, checkpoint, device, precision, engine)
        return
    with closing(Collection(collection, read_only=True)) as opened:
        problems = opened.verify()
        n_images = len(opened)
        for problem in problems:
            typer.echo(printable(str(problem)))
        if codes and n_images:
            encoder = Searcher.open(opened, device=device, precision=precision, engine=engine).encoder
            found = recheck(opened, encoder, codes, seed)
            problems += found.findings
            typer.echo("\n".join([f"encoded again by {found.engine}:", *(f"  {part}" for part in found.compared)]))
            for problem in found.findings:
                typer.echo(printable(str(problem)))
    typer.echo(f"{n_images} images, {len(problems)} problems")
    if problems:
        raise typer.Exit(1)


def _check_together(
    *, repair: bool, checkpoint: Path | None, codes: int, seed: int, encoding: Mapping[str, bool]
) -> None:
    if repair and codes:
        raise BadConfig("--codes and --repair do not go together: repair first, then verify with --codes")
    if checkpoint is not None and not repair:
        raise BadConfig("--checkpoint goes with --repair: add it, or leave --checkpoint out")
    if seed and not codes:
        raise BadConfig("--seed goes with --codes: add it, or leave --seed out")
    given = [option for option, is_given in encoding.items() if is_given]
    if given and not (repair or codes):
        raise BadConfig(
            f"{given[0]} goes with --codes or --repair, without which nothing is encoded: add one, or leave "
            f"{given[0]} out"
        )


def search(
    collection: CollectionArgument,
    image: Annotated[Path, typer.Argument(help="The picture to search with.")],
    k: Annotated[int, typer.Option("-k", help="Number of results.")] = 10,
    max_distance: Annotated[int | None, typer.Option(help="Leave out what is further away (bits).")] = None,
    min_precision: Annotated[
        float | None,
        typer.Option(help="Instead of a distance: so large a share is expected to be relevant, see `index calibrate`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Another file of the collection's checkpoint; default: its own copy.")
    ] = None,
    effort: Annotated[
        int | None, typer.Option(help="Of an approximate index, how hard to look; `index stats` shows some values.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only images that carry this label; of several, all of them.")
    ] = None,
    any_label: Annotated[
        list[str] | None, typer.Option(help="Only images that carry at least one of these labels.")
    ] = None,
    without: Annotated[list[str] | None, typer.Option(help="No image that carries one of these labels.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="Only images with such an attribute: camera=X, year>=2015, title^=abc; may be repeated."),
    ] = None,
    key: Annotated[list[str] | None, typer.Option(help="Only images with one of these keys.")] = None,
    added_after: Annotated[
        str | None, typer.Option(help="Only images added at this ISO 8601 date or time (UTC) or later.")
    ] = None,
    added_before: Annotated[str | None, typer.Option(help="Only images added earlier than this.")] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "torch",
) -> None:
    """Find the stored images most similar to a picture, nearest first; only what the filters let through is ranked."""
    check_limits(k, max_distance)
    among = make_filter(
        all_labels=label or (),
        any_labels=any_label or (),
        no_labels=without or (),
        where=where or (),
        keys=key or (),
        added_after=added_after,
        added_before=added_before,
    )
    with closing(Collection(collection, read_only=True)) as opened:
        data = read_bytes(image)
        searcher = Searcher.open(opened, checkpoint=checkpoint, device=device, precision=precision, engine=engine)
        picture = searcher.decode(data, name=str(image))
        [answer] = searcher.search(
            [picture.image], k=k, max_distance=max_distance, min_precision=min_precision, among=among, effort=effort
        )
    if as_json:
        hits = [
            {"rank": hit.rank, "distance": hit.distance, "relevance": hit.relevance, **asdict(hit.image)}
            for hit in answer.hits
        ]
        typer.echo(json.dumps({"n_bits": opened.n_bits, "fingerprint": opened.fingerprint, "hits": hits}, indent=2))
    else:
        typer.echo(_table(answer))


def _table(answer: Answer) -> str:
    """Rank, distance in bits, id, path and labels of each hit, in columns that no terminal's width cuts off.

    In a calibrated collection also how likely each is relevant.
    """
    calibrated = any(hit.relevance is not None for hit in answer.hits)
    rows = [("rank", "bits", *(["relevance"] if calibrated else []), "id", "path", "labels")]
    for hit in answer.hits:
        path, labels = printable(hit.image.path), printable("; ".join(hit.image.labels))
        likely = [] if hit.relevance is None else [f"{hit.relevance:.3f}"]
        rows.append((str(hit.rank), str(hit.distance), *likely, str(hit.image.id), path, labels))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
