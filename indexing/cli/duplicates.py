"""The subcommand `index duplicates`."""

import json
from collections.abc import Mapping
from contextlib import closing
from typing import Annotated, Any

import typer

from hashseek.indexing.cli.options import (
    ENCODING,
    AllowPrivate,
    CollectionArgument,
    Device,
    Engine,
    Precision,
    encoder_options,
    given_options,
    refuse_without,
)
from hashseek.indexing.cli.output import Output
from hashseek.indexing.collection import Collection
from hashseek.indexing.index.duplicates import not_kept
from hashseek.indexing.maintenance.flips import Orientation, flipped_groups
from hashseek.indexing.printing import printable
from hashseek.indexing.searcher import Searcher


def duplicates(
    context: typer.Context,
    collection: CollectionArgument,
    radius: Annotated[int, typer.Option(help="Bits by which two linked images may differ; 0: equal codes.")] = 0,
    flips: Annotated[
        bool,
        typer.Option("--flips", help="Also link mirrored and rotated copies: encodes every image in 6 orientations."),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also print groups whose images were all marked as kept.")
    ] = False,
    allow_private: AllowPrivate = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each group as a JSON list, one per line.")] = False,
    device: Device = "auto",
    precision: Precision = "auto",
    engine: Engine = "auto",
) -> None:
    """Print groups of near-duplicates: images linked by chains of neighbours within the radius.

    With --flips, each image is printed with its orientation relative to the first of its group.
    """
    refuse_without(["--flips"], ["--allow-private", *ENCODING], given_options(context))
    encoding = encoder_options(device, precision, engine)
    with closing(Collection(collection, read_only=True)) as opened:
        kept = [] if everything else opened.catalog.kept_groups()
        groups: list[Mapping[int, Orientation | None]]
        if flips:
            encoder = Searcher.open(opened, **encoding).image_encoder
            with Output().progress("encoding") as progress:
                found, unreadable = flipped_groups(
                    opened, encoder, radius=radius, allow_private=allow_private, progress=progress
                )
            groups = list(not_kept(found, kept))
            for image_id, problem in unreadable.items():
                typer.echo(f"image {image_id} was compared by its stored code only: {printable(problem)}", err=True)
        else:
            groups = [dict.fromkeys(ids.tolist()) for ids in not_kept(opened.duplicates(radius=radius), kept)]
        for group in groups:
            _print_group(opened, group, as_json=as_json)
        if not groups and not as_json:
            typer.echo(f"no near-duplicates were found within {radius} bits: --radius sets another limit")


def _print_group(opened: Collection, group: "Mapping[int, Orientation | None]", *, as_json: bool) -> None:
    records = [image for image in opened.catalog.get(list(group)) if image is not None]
    if as_json:
        content = []
        for image in records:
            entry: dict[str, Any] = {"id": image.id, "key": image.key, "path": image.path}
            if (orientation := group[image.id]) is not None:
                entry |= {"mirrored": orientation.mirrored, "turned": 90 * orientation.quarters}
            content.append(entry)
        typer.echo(json.dumps(content))
        return
    for image in records:
        how = str(group[image.id] or "")
        typer.echo(f"{image.id}  {printable(image.path or str(image.key))}" + (f"  ({how})" if how else ""))
    typer.echo()
