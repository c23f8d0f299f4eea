"""The command `hashseek evaluate`. Heavy modules are imported only after the arguments have been checked."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hashseek.retrieval.checkpoint import load_header
from hashseek.retrieval.devices import PrecisionName
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.label_files import OnError
from hashseek.retrieval.plugins import check_trusted
from hashseek.training.cli.data import find_data
from hashseek.training.config import DataSection
from hashseek.training.data.datasets import build_splits
from hashseek.training.data.paths import expand
from hashseek.training.progress import Progress

DataOption = Annotated[
    str | None,
    typer.Option(
        help="The data set: its name, a folder or its list, or a TOML file. Default: the one it was trained on."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Precision = Annotated[PrecisionName, typer.Option(help="Precision of the network.")]


def evaluate(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            help="Checkpoints from `hashseek train`. The report is about the first and compares it with the others.",
        ),
    ],
    data: DataOption = None,
    n: Annotated[
        list[str] | None,
        typer.Option("--n", "-n", help="N of mAP@N, or all; may be repeated. Default: 10, 100, 1000 and 5000."),
    ] = None,
    normalizer: Annotated[
        Literal["retrieved", "possible", "relevant"],
        typer.Option(help="Divide AP by the relevant images retrieved, by min(N, all relevant), or by all relevant."),
    ] = "retrieved",
    protocol: Annotated[
        Literal["hyp2"] | None, typer.Option(help="Also report the value that HyP2's evaluation code would print.")
    ] = None,
    labels: Annotated[
        Literal["held-out", "seen", "all"] | None,
        typer.Option(help="Labels to evaluate on, if some were held out of training. Default: held-out."),
    ] = None,
    lengths: Annotated[
        bool, typer.Option("--lengths", help="Also compare shorter codes of nested checkpoints.")
    ] = False,
    on_error: Annotated[OnError | None, typer.Option(help="Skip bad lines and images, or stop. Default: stop.")] = None,
    baseline: Annotated[
        Literal["itq", "none"],
        typer.Option(
            help="itq: also evaluate the same backbone with a hash layer fitted to training images without labels, if "
            "that is possible."
        ),
    ] = "itq",
    points: Annotated[int, typer.Option(min=0, help="Number of database images in the t-SNE; 0 skips it.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random in the report.")] = 0,
    url: Annotated[
        str | None,
        typer.Option(help="Check that the service at this URL ranks like the library; writes no report."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Store the calibration in the collection in this folder, for `search --min-precision`."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the report. Default: evaluation-NAME next to the checkpoint; --data with a fingerprint of "
            "the splits, --labels and --normalizer are added to it."
        ),
    ] = None,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Evaluate how well a checkpoint retrieves images, and write a report.

    With --url, the exit code is 1 if a ranking of the service differs from that of the library.
    """
    if url is not None and (len(checkpoints) > 1 or lengths or calibrate or protocol or out):
        raise BadConfig("--url needs one checkpoint, without --lengths, --calibrate, --protocol or --out")
    header, *_ = [load_header(checkpoint) for checkpoint in checkpoints]
    if (url is not None or calibrate is not None) and labels != "all" and header.training.get("held_out"):
        raise BadConfig(
            f"{'--calibrate' if url is None else '--url'} needs the whole database, but labels were held out of the "
            f"training of {checkpoints[0]}, so it is evaluated on a part: set --labels all"
        )
    if calibrate is not None:  # before the data are read, which may take minutes
        from hashseek.training.evaluation.evaluate import check_calibrates

        check_calibrates(calibrate, checkpoints[0])
    ns = parse_ns(n) if n else None

    name, options = data_options(checkpoints[0], data)
    options |= {"on_error": on_error} if on_error else {}
    splits = build_splits(name, **options)  # bad input is refused before torch is loaded

    from hashseek.training.evaluation.assembly import DEFAULT_NS, EvaluationOptions
    from hashseek.training.runs.environment import command_line

    how = EvaluationOptions(
        data_name=name_in_report(data, name, options),
        data_set=name,
        ns=ns or DEFAULT_NS,
        normalizer=normalizer,
        labels=labels,
        protocol=protocol,
        seed=seed,
        device=device,
        precision=precision,
        command=command_line(),
        as_trained=data is None and on_error is None,
        progress=Progress(),
    )
    if url is not None:
        raise typer.Exit(_check_service(url, checkpoints[0], splits, how))
    from hashseek.training.evaluation.evaluate import evaluate as run
    from hashseek.training.evaluation.evaluate import keep_calibration
    from hashseek.training.evaluation.report.markdown import summary

    # Other data or labels are another result, which must not replace the first.
    other = [f"{Path(data).resolve().stem}-{splits.fingerprint[:8]}" if data else ""]
    other += [labels or "", normalizer if normalizer != "retrieved" else ""]
    folder = out or checkpoints[0].parent / "-".join(["evaluation", checkpoints[0].stem, *filter(None, other)])
    folder.mkdir(parents=True, exist_ok=True)  # fail before the work if this is not possible
    try:
        evaluation = run(
            checkpoints[0],
            splits,
            how,
            others=checkpoints[1:],
            lengths=lengths,
            baseline=baseline == "itq",
            n_points=points,
        )
    except BaseException:
        with suppress(OSError):  # it has an earlier report
            folder.rmdir()
        raise
    page = evaluation.write(folder)[0]
    typer.echo(summary(evaluation.report))
    if calibrate is not None:
        keep_calibration(calibrate, checkpoints[0], evaluation.report)
        typer.echo(f"stored the calibration in {calibrate}", err=True)
    typer.echo(f"wrote the report to {page}", err=True)


def _check_service(url: str, checkpoint: Path, splits: Any, options: Any) -> int:
    """Print whether the service and the library agree; returns the exit code."""
    from hashseek.training.evaluation.service_check import check_service

    found = check_service(url, checkpoint, splits, options)
    typer.echo(found.as_markdown())
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    return 1 if found.differences else 0


def data_options(checkpoint: Path, data: str | None) -> tuple[str, dict[str, Any]]:
    """Name and options of the data set that `--data` means, or that the checkpoint was trained on."""
    if data is None:
        section = load_header(checkpoint).training.get("data")
        if not section:
            raise BadConfig(f"{checkpoint} does not record its training data: choose a data set with --data")
        trained_on = DataSection(**section)
        options = trained_on.options()
        if ":" in trained_on.name:
            or_else = ", or pass the data set with --data"
            check_trusted(trained_on.name, kind="data set", source=checkpoint, or_else=or_else)
        if trained_on.name == "folder" and not (root := expand(options["root"])).exists():
            raise BadConfig(
                f"{checkpoint} was trained on {root}, which does not exist: run the command in the folder where the "
                "training was started, or pass the data set with --data"
            )
        return trained_on.name, options
    found = find_data(data)
    return found.name, found.options()


def name_in_report(data: str | None, name: str, options: dict[str, Any]) -> str:
    """What a report calls the data: `--data` as it was given, or else the folder or data set that was trained on."""
    return data or str(options["root"] if name == "folder" else name)


def parse_ns(words: Sequence[str]) -> tuple[int | None, ...]:
    """The values of N in ascending order, None for "all"."""
    for word in words:
        if word != "all" and not (word.isdecimal() and int(word)):
            raise BadConfig(f"N must be a positive integer or all, got {word!r}")
    if not words:
        raise BadConfig("name at least one N, a positive integer or all")
    numbers = sorted({int(word) for word in words if word != "all"})
    return *numbers, *([None] if "all" in words else [])
