"""The subcommands of `index`."""

import json
from contextlib import closing, suppress
from typing import Annotated, Any, Literal

import typer

from hashseek.indexing.calibration import stored_calibration
from hashseek.indexing.catalog.filters import make_filter
from hashseek.indexing.cli.add import add
from hashseek.indexing.cli.duplicates import duplicates
from hashseek.indexing.cli.fitting import refit
from hashseek.indexing.cli.maintenance import app as maintenance
from hashseek.indexing.cli.options import (
    AddedAfter,
    AddedBefore,
    CollectionArgument,
    StoreArgument,
    Where,
    WithAnyLabel,
    WithLabel,
    WithoutLabel,
)
from hashseek.indexing.cli.output import N_SHOWN
from hashseek.indexing.collection import Collection
from hashseek.indexing.opening import open_store
from hashseek.indexing.printing import counted, printable
from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.errors import BadCheckpoint, BadCodes, BadConfig

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
        int | None, typer.Option(help="With a filter: the number of images that match it; otherwise none is removed.")
    ] = None,
) -> None:
    """Remove images from a collection: those with these ids and keys, or all that match the filters.

    All of them are removed, or none if one does not exist.
    """
    among = make_filter(
        all_labels=label,
        any_labels=any_label,
        no_labels=without,
        where=where,
        added_after=added_after,
        added_before=added_before,
    )
    if bool(ids or key) == (among is not None):
        raise BadConfig("pass either images, by id or with --key, or filters such as --label")
    if expected is not None and among is None:
        raise BadConfig("--expected is for filters: leave it out")
    with closing(open_store(collection)) as opened:
        if among is None:
            named = list(dict.fromkeys([*(ids or []), *(opened.by_key(name).id for name in key or [])]))
        else:
            named = opened.ids_where(among).tolist()
            if len(named) != expected:
                remedy = f"; to remove them, add --expected {len(named)}" if named else ""
                raise BadConfig(f"nothing was removed: the filters match {counted(len(named), 'image')}{remedy}")
        opened.remove(named, missing_ok=among is not None)  # another process may just have removed one
        opened.save_index()
        typer.echo(f"removed {len(named)}; {opened.place} holds {counted(len(opened), 'image')}")


@app.command()
def build(
    collection: CollectionArgument,
    kind: Annotated[
        Literal["exact", "multi-index", "gpu", "ivf", "hnsw"],
        typer.Option(help="exact, multi-index and gpu find all hits; ivf and hnsw are faster but may miss some."),
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
            "features": "stored" if opened.keeps_features else "not stored",
            **(_of_folder(opened) if isinstance(opened, Collection) else {}),
            "engines": {name or "unknown": n for name, n in opened.engines().items()},
            "labels": opened.label_counts(),
        }
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    content["labels"] = _most_frequent(content["labels"])
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
    if without_code := opened.catalog.spaces.n_missing(own):
        found["without_code"] = without_code  # searches do not find these
    states = {space.id: "in use" if space.id == own else space.state for space in spaces}
    shown = {str(one.id): f"{one.fingerprint[:12]} ({one.n_bits} bits, {states[one.id]})" for one in spaces}
    with suppress(BadCodes):  # damaged, which searches that need it report
        if made := stored_calibration(opened):
            found["calibration"] = {"from": made.source, "images": made.n_images, "made": made.made_at}
    return {**found, "spaces": shown}


def _most_frequent(counts: dict[str, int]) -> dict[str, int] | str:
    """The labels to show, or the most frequent ones as a text that says how many there are."""
    if len(counts) <= N_SHOWN:
        return counts
    most = sorted(counts.items(), key=lambda item: -item[1])[:N_SHOWN]
    return f"{_line(dict(most))} and {counted(len(counts) - N_SHOWN, 'more label')} (--json shows all)"


def _line(content: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in content.items())
