"""The subcommands of `index`, and `search`. Modules that load torch are imported when a command needs them."""

import json
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hashseek.indexing.calibration import stored_calibration
from hashseek.indexing.catalog.filters import FILTER_HELP, make_filter
from hashseek.indexing.cli.add import add
from hashseek.indexing.cli.duplicates import duplicates
from hashseek.indexing.cli.fitting import refit
from hashseek.indexing.cli.maintenance import app as maintenance
from hashseek.indexing.cli.options import (
    ENCODING,
    AddedAfter,
    AddedBefore,
    CollectionArgument,
    Device,
    Engine,
    Precision,
    StoreArgument,
    Where,
    WithAnyLabel,
    WithLabel,
    WithoutLabel,
    encoder_options,
    given_options,
    is_url,
    refuse,
)
from hashseek.indexing.cli.vectors import read_queries
from hashseek.indexing.collection import Collection
from hashseek.indexing.opening import Store, open_store
from hashseek.indexing.printing import counted, printable
from hashseek.indexing.searcher import OVERSAMPLE, Answer, Rank, Searcher, SearchOptions, check_rank
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadCheckpoint, BadCodes, BadConfig
from hashseek.retrieval.images import read_bytes

app = typer.Typer()
app.add_typer(maintenance)
app.command()(add)
app.command()(refit)
app.command()(duplicates)


@app.command()
def remove(
    collection: StoreArgument,
    ids: Annotated[list[int] | None, typer.Argument(help="Ids of images.")] = None,
    key: Annotated[list[str] | None, typer.Option(help="Key of an image; may be repeated.")] = None,
    label: WithLabel = None,
    any_label: WithAnyLabel = None,
    without: WithoutLabel = None,
    where: Where = None,
    added_after: AddedAfter = None,
    added_before: AddedBefore = None,
    expected: Annotated[
        int | None, typer.Option(help="With a filter: the number of images that pass it; otherwise none is removed.")
    ] = None,
) -> None:
    """Remove images from a collection: those with these ids and keys, or all that pass the filters.

    All of them are removed, or none if one does not exist.
    """
    among = make_filter(
        all_labels=label or (),
        any_labels=any_label or None,
        no_labels=without or (),
        where=where or (),
        added_after=added_after,
        added_before=added_before,
    )
    if bool(ids or key) == (among is not None):
        raise BadConfig("give either images, by id or with --key, or filters such as --label")
    if expected is not None and among is None:
        raise BadConfig("--expected is for filters: leave it out")
    with closing(open_store(collection)) as opened:
        if among is None:
            named = list(dict.fromkeys([*(ids or []), *(opened.by_key(name).id for name in key or [])]))
        else:
            named = opened.ids_where(among).tolist()
            if len(named) != expected:
                remedy = f"; to remove them, add --expected {len(named)}" if named else ""
                raise BadConfig(
                    f"nothing was removed: the number of images that pass the filters is {len(named)}{remedy}"
                )
        opened.remove(named, missing_ok=among is not None)  # another process may just have removed one
        opened.save_index()
        typer.echo(f"removed {len(named)}; {opened.place} holds {counted(len(opened), 'image')}")


@app.command()
def build(
    collection: CollectionArgument,
    kind: Annotated[
        Literal["exact", "ivf", "hnsw", "gpu"],
        typer.Option(help="exact and gpu compare every code; the other kinds are faster but may miss some hits."),
    ] = "exact",
) -> None:
    """Rebuild the index as the given kind, which the collection then keeps."""
    with closing(Collection(collection)) as opened:
        opened.build_index(kind)
        typer.echo(_line(opened.describe_index()))


@app.command()
def stats(
    collection: StoreArgument, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show what a collection holds."""
    with closing(open_store(collection, read_only=True)) as opened:
        content = {
            "images": len(opened),
            "bits": opened.n_bits,
            "fingerprint": opened.fingerprint,
            "index": opened.describe_index(),
            "features": "kept" if opened.keeps_features else "not kept",
            **(_of_folder(opened) if isinstance(opened, Collection) else {}),
            "engines": {name or "unknown": n for name, n in opened.engines().items()},
            "labels": opened.label_counts(),
        }
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    for key, value in content.items():
        shown = (_line(value) or "none") if isinstance(value, dict) else value
        typer.echo(f"{key:12} {printable(str(shown))}")


def _of_folder(opened: Collection) -> dict[str, Any]:
    """How the hash layer of a collection in a folder was fitted, if it was, and its code spaces, by number."""
    found: dict[str, Any] = {}
    with suppress(BadCheckpoint):  # missing or damaged, which `index verify` reports
        header = load_header(opened.checkpoint)
        if record := header.training.get("fit"):
            counts = {name: record[f"n_{name}"] for name in ("images", "vectors") if f"n_{name}" in record}
            found["fit"] = {"method": record["method"], **counts, "backbone": header.backbone}
    own, spaces = opened.catalog.space.id, opened.catalog.spaces.all()
    states = {space.id: "in use" if space.id == own else space.state for space in spaces}
    shown = {str(one.id): f"{one.fingerprint[:12]} ({one.n_bits} bits, {states[one.id]})" for one in spaces}
    with suppress(BadCodes):  # damaged, which searches that need it report
        if made := stored_calibration(opened):
            found["calibration"] = {"from": made.source, "images": made.n_images, "made": made.made_at}
    return {**found, "spaces": shown}


def _line(content: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in content.items())


def _no_url(image: Path | None) -> Path | None:
    if image is not None and is_url(image):
        raise BadConfig(f"the query must be a file, not the URL {image}: download it first, for example with curl -O")
    return image


def search(
    context: typer.Context,
    collection: StoreArgument,
    image: Annotated[Path | None, typer.Argument(help="The image to search with.", callback=_no_url)] = None,
    vector: Annotated[
        Path | None, typer.Option(help="Instead of an image: an .npy file with one vector, or one per row.")
    ] = None,
    stored_id: Annotated[
        int | None,
        typer.Option("--id", help="Instead of an image: the id of a stored one, which is excluded from the results."),
    ] = None,
    stored_key: Annotated[str | None, typer.Option("--of-key", help="Like --id, but by key.")] = None,
    k: Annotated[int, typer.Option("-k", help="Number of results.")] = 10,
    max_distance: Annotated[int | None, typer.Option(help="Largest Hamming distance of a result, in bits.")] = None,
    min_precision: Annotated[
        float | None,
        typer.Option(help="Instead of a distance: expected share of relevant results; needs `index calibrate`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Another copy of the collection's checkpoint; required for a collection in Milvus, which keeps none."
        ),
    ] = None,
    effort: Annotated[
        int | None, typer.Option(help="How thoroughly an approximate index searches; `index stats` lists some values.")
    ] = None,
    rank: Annotated[
        Rank | None,
        typer.Option(
            help="How hits are ordered: hamming, by distance (default for --id and --of-key); asymmetric, by the "
            "query's real-valued outputs against the stored bits (default otherwise); float, by the cosine of the "
            "features (see `index add --keep-features`)."
        ),
    ] = None,
    oversample: Annotated[
        int, typer.Option(help="asymmetric and float reorder the oversample x k nearest images by Hamming distance.")
    ] = OVERSAMPLE,
    label: WithLabel = None,
    any_label: WithAnyLabel = None,
    without: WithoutLabel = None,
    where: Where = None,
    key: Annotated[list[str] | None, typer.Option(help=FILTER_HELP["keys"])] = None,
    added_after: AddedAfter = None,
    added_before: AddedBefore = None,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "auto",
) -> None:
    """Find the stored images most similar to a new or stored image (or vectors, to a vector), best first."""
    among = make_filter(
        all_labels=label or (),
        any_labels=any_label or None,
        no_labels=without or (),
        where=where or (),
        keys=key or None,
        added_after=added_after,
        added_before=added_before,
    )
    options = SearchOptions(k, max_distance, min_precision, among, effort, rank, oversample)
    encoding = encoder_options(device, precision, engine)
    queries = {"an image": image, "--vector": vector, "--id": stored_id, "--of-key": stored_key}
    given = [name for name, value in queries.items() if value is not None]
    if len(given) != 1:
        raise BadConfig(f"give exactly one query, not {' and '.join(given) or 'none'}: {', '.join(queries)}")
    if image is None:
        refuse(given[0], ENCODING, given_options(context))
    with closing(open_store(collection, checkpoint=checkpoint, read_only=True)) as opened:
        check_rank(opened, options, stored=image is None and vector is None)
        data = b"" if image is None else read_bytes(image)
        vectors = None if vector is None else read_queries(vector)
        if stored_key is not None:
            stored_id = opened.by_key(stored_key).id
        if stored_id is not None:
            answers = [_similar(Searcher.of_stored(opened, checkpoint=checkpoint), stored_id, options)]
        else:
            searcher = Searcher.open(opened, checkpoint=checkpoint, **encoding)
            if vectors is not None:
                answers = searcher.search_vectors(vectors, options)
            else:
                answers = [searcher.search_files([data], options, name=str(image))]
    if as_json:
        contents = [_as_json(answer, opened) for answer in answers]
        typer.echo(json.dumps(contents[0] if len(contents) == 1 else contents, indent=2))
    elif not any(answer.hits for answer in answers):
        typer.echo("nothing was found: the collection is empty, or nothing in it passes the filters and is near enough")
    else:
        titles = ["" if len(answers) == 1 else f"row {row}:\n" for row in range(len(answers))]
        typer.echo("\n\n".join(title + _table(answer) for title, answer in zip(titles, answers, strict=True)))


def _similar(searcher: Searcher, image_id: int, options: SearchOptions) -> Answer:
    """The hits of a stored image without itself."""
    answer = searcher.similar(image_id, replace(options, k=options.k + 1))
    others = [hit for hit in answer.hits if hit.image.id != image_id][: options.k]
    return replace(answer, hits=tuple(replace(hit, rank=place) for place, hit in enumerate(others, start=1)))


def _as_json(answer: Answer, collection: Store) -> dict[str, Any]:
    hits = []
    for hit in answer.hits:
        values = asdict(hit)
        hits.append(values | values.pop("image"))
    return {
        "n_bits": collection.n_bits,
        "fingerprint": collection.fingerprint,
        "ranked_by": answer.rank,
        "hits": hits,
    }


def _table(answer: Answer) -> str:
    """Rank, score, distance in bits, id, path (or key) and labels of each hit; if calibrated, also its relevance."""
    calibrated = any(hit.relevance is not None for hit in answer.hits)
    scored = answer.rank != "hamming"
    rows = [
        ("rank", *(["score"] if scored else []), "bits", *(["relevance"] if calibrated else []), "id", "path", "labels")
    ]
    for hit in answer.hits:
        path, labels = printable(hit.image.path or str(hit.image.key)), printable("; ".join(hit.image.labels))
        relevance = [] if hit.relevance is None else [f"{hit.relevance:.3f}"]
        score = [] if hit.score is None else [f"{hit.score:.3f}"]
        rows.append((str(hit.rank), *score, str(hit.distance), *relevance, str(hit.image.id), path, labels))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
