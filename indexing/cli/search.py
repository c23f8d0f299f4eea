"""The command `hashseek search`."""

import json
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hashseek.indexing.catalog.filters import FILTER_HELP, make_filter
from hashseek.indexing.cli.options import (
    ENCODING,
    AddedAfter,
    AddedBefore,
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
    refuse,
)
from hashseek.indexing.cli.vectors import read_queries
from hashseek.indexing.opening import Store, open_store
from hashseek.indexing.printing import printable
from hashseek.indexing.searcher import Answer, Rank, Searcher, SearchOptions
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.images import read_bytes


def _no_url(image: Path | None) -> Path | None:
    if str(image).startswith(("http:/", "https:/")):  # a path has one slash of the two
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
    k: Annotated[int, typer.Option("-k", help="Number of results.")] = SearchOptions.k,
    max_distance: Annotated[int | None, typer.Option(help="Largest Hamming distance of a result, in bits.")] = None,
    min_precision: Annotated[
        float | None,
        typer.Option(help="Instead of a distance: expected share of relevant results; needs `index calibrate`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Another copy of the collection's checkpoint; required for a collection in Milvus, which stores none."
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
    ] = SearchOptions.oversample,
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
        all_labels=label,
        any_labels=any_label,
        no_labels=without,
        where=where,
        keys=key,
        added_after=added_after,
        added_before=added_before,
    )
    options = SearchOptions(k, max_distance, min_precision, among, effort, rank, oversample)
    encoding = encoder_options(device, precision, engine)
    queries = {"an image": image, "--vector": vector, "--id": stored_id, "--of-key": stored_key}
    given = [name for name, value in queries.items() if value is not None]
    if len(given) != 1:
        raise BadConfig(f"pass exactly one query, not {' and '.join(given) or 'none'}: {', '.join(queries)}")
    if image is None:
        refuse(given[0], ENCODING, given_options(context))
    with closing(open_store(collection, checkpoint=checkpoint, read_only=True)) as opened:
        searcher = Searcher.of_stored(opened, checkpoint=checkpoint)
        searcher.check(options, stored=image is None and vector is None)  # before a network is loaded
        data = b"" if image is None else read_bytes(image)
        vectors = None if vector is None else read_queries(vector)
        if stored_key is not None:
            stored_id = opened.by_key(stored_key).id
        if stored_id is not None:
            answers = [_similar(searcher, stored_id, options)]
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
        typer.echo("nothing was found: the collection is empty, or nothing near enough matches the filters")
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
