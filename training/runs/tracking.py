"""Where a run is followed beside its log: TensorBoard, MLflow, and the run's own report.

The log is the truth. What a kill lost or left over elsewhere is made good from it when the run goes on.
"""

import importlib
import json
import logging
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import write_atomically
from hashseek.training.config import Config
from hashseek.training.data.splits import Splits
from hashseek.training.runs.environment import environment
from hashseek.training.runs.run_folder import Run
from hashseek.training.runs.run_report import write_report

Status = Literal["finished", "failed", "killed"]
Record = dict[str, Any]

# Drawing takes some 10 ms, and an epoch on a frozen backbone 50.
SECONDS_BETWEEN_REPORTS = 30.0

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """A place that is told of every epoch."""

    def epoch(self, record: Record) -> None:
        """A finished epoch."""

    def close(self, status: Status) -> None:
        """The end of this process's part of the run."""


class Tracker:
    """Tells every sink what a run does; silent until it is started."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []

    def start(
        self,
        run: Run,
        config: Config,
        splits: Splits,
        *,
        n_fit: int,
        n_validation: int,
        device: torch.device,
        records: Sequence[Record],
    ) -> None:
        """Write environment.json and splits.json, and open the sinks.

        Args:
            run: the run's folder.
            config: its configuration.
            splits: its data set.
            n_fit: rows that are learnt from.
            n_validation: rows that are validated on.
            device: what it is computed on.
            records: the epochs that are done.

        Raises:
            BadConfig: the run was made with other splits, or MLflow is wanted and is missing or does not answer.
        """
        _write_splits(run, config, splits, n_fit=n_fit, n_validation=n_validation)
        starts = json.loads(run.environment.read_text(encoding="utf-8")) if run.environment.is_file() else []
        starts.append({"first_epoch": len(records), **environment(device, devices=config.train.devices)})
        write_atomically(run.environment, json.dumps(starts, indent=2).encode())
        if config.tracking.tensorboard:
            self._sinks.append(TensorBoard(run, records))
        if config.tracking.mlflow:
            uri = config.tracking.mlflow if isinstance(config.tracking.mlflow, str) else None
            self._sinks.append(MLflow(run, config, splits, records, uri=uri))
        self._sinks.append(Report(run, records))

    def epoch(self, record: Record) -> None:
        """Tell of a finished epoch."""
        for sink in self._sinks:
            sink.epoch(record)

    def close(self, status: Status) -> None:
        """Close every sink."""
        while self._sinks:
            self._sinks.pop().close(status)


class TensorBoard:
    """RUN/tensorboard, one event file: written anew from the log when a run goes on, so nothing is there twice."""

    def __init__(self, run: Run, records: Sequence[Record]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for file in run.tensorboard.glob("events.out.tfevents.*"):
            file.unlink()
        self._writer: Any = SummaryWriter(str(run.tensorboard))
        ended = run.log.stat().st_mtime if records else 0.0
        left = sum(record["seconds"] for record in records)
        for record in records:
            left -= record["seconds"]
            self._add(record, ended - left)
        self._writer.flush()

    def epoch(self, record: Record) -> None:
        """Write the epoch's points."""
        self._add(record, time.time())
        self._writer.flush()

    def close(self, status: Status) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()

    def _add(self, record: Record, when: float) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["epoch"] + 1, walltime=when)


class MLflow:
    """A run of an MLflow server or store; its id is kept in RUN/mlflow.json, so that a resumed run goes on in it.

    Trouble at the start is an error; later it costs the points, not the training: they follow at the next resume.
    """

    def __init__(self, run: Run, config: Config, splits: Splits, records: Sequence[Record], *, uri: str | None) -> None:
        try:
            mlflow: Any = importlib.import_module("mlflow")
        except ImportError:
            raise BadConfig(
                "tracking.mlflow is set, but MLflow is not installed: pip install mlflow-skinny, or set it to false"
            ) from None
        self._entities = mlflow.entities
        self._error: type[Exception] = mlflow.exceptions.MlflowException
        self._lost = False
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            self._id = self._find(run) or self._create(run, config, splits)
            self._client.set_terminated(self._id, status="RUNNING")
            self._catch_up(records)
        except self._error as error:
            where = uri or "the default of MLflow"
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise BadConfig(
                f"tracking.mlflow: {where} cannot be used ({reason}): mend it, or set it to false"
            ) from None

    def epoch(self, record: Record) -> None:
        """Send the epoch's points."""
        try:
            self._client.log_batch(self._id, metrics=self._points(record))
        except self._error as error:
            if not self._lost:
                _log.warning("MLflow did not take epoch %d (%s): a resume sends it again", record["epoch"] + 1, error)
            self._lost = True

    def close(self, status: Status) -> None:
        """End the run there."""
        try:
            self._client.set_terminated(self._id, status=status.upper())
        except self._error as error:
            _log.warning("MLflow was not told that the run ended: %s", error)

    def _find(self, run: Run) -> str | None:
        if not run.mlflow.is_file():
            return None
        run_id: str = json.loads(run.mlflow.read_text(encoding="utf-8"))["run_id"]
        self._client.get_run(run_id)  # raises if it is gone, or if this is another store
        return run_id

    def _create(self, run: Run, config: Config, splits: Splits) -> str:
        experiment = self._client.get_experiment_by_name("hashseek")
        number = experiment.experiment_id if experiment else self._client.create_experiment("hashseek")
        run_id: str = self._client.create_run(
            number, run_name=run.folder.resolve().name, tags={"splits_sha256": splits.fingerprint}
        ).info.run_id
        write_atomically(run.mlflow, json.dumps({"run_id": run_id}).encode())
        settings = _flat(config.model_dump(mode="json"))
        self._client.log_batch(
            run_id, params=[self._entities.Param(key, str(value)[:500]) for key, value in settings.items()]
        )
        return run_id

    def _catch_up(self, records: Sequence[Record]) -> None:
        """Send the points that a kill or a lost connection left out."""
        names = {name for record in records for name in scalars(record)}
        sent = {
            (point.key, point.step)
            for name in names
            for point in self._client.get_metric_history(self._id, _mlflow_name(name))
        }
        for record in records:
            missing = [point for point in self._points(record) if (point.key, point.step) not in sent]
            if missing:
                self._client.log_batch(self._id, metrics=missing)

    def _points(self, record: Record) -> list[Any]:
        now, step = round(time.time() * 1000), record["epoch"] + 1
        return [self._entities.Metric(_mlflow_name(name), value, now, step) for name, value in scalars(record).items()]


class Report:
    """The run's own page; drawn at the end, and before that only now and then."""

    def __init__(self, run: Run, records: Sequence[Record]) -> None:
        self._run = run
        self._records = list(records)
        self._drawn = time.monotonic()

    def epoch(self, record: Record) -> None:
        """Draw if the last time is long ago."""
        self._records.append(record)
        if time.monotonic() - self._drawn > SECONDS_BETWEEN_REPORTS:
            write_report(self._run, self._records)
            self._drawn = time.monotonic()

    def close(self, status: Status) -> None:  # noqa: ARG002
        """Draw what there is."""
        if self._records:
            write_report(self._run, self._records)


def scalars(record: Record) -> dict[str, float]:
    """The curves of an epoch, by their names in TensorBoard."""
    found = {}
    for key, value in record.items():
        if key == "loss":
            found["loss/sum"] = value
        elif key.startswith("loss_"):
            found[f"loss/{key.removeprefix('loss_')}"] = value
        elif key.startswith("val_"):
            found[f"validation/{key.removeprefix('val_')}"] = value
        elif key != "epoch":
            found[key] = value
    return found


def _mlflow_name(name: str) -> str:
    return name.replace("@", "_at_")  # MLflow allows no @


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


def _write_splits(run: Run, config: Config, splits: Splits, *, n_fit: int, n_validation: int) -> None:
    described = {
        "data": config.data.model_dump(mode="json"),
        "splits_sha256": splits.fingerprint,
        "sizes": {"train": len(splits.train), "query": len(splits.query), "database": len(splits.database)},
        "of_train": {"learnt_from": n_fit, "validated_on": n_validation},
        "label_names": list(splits.label_names),
        "train_images_per_label": splits.train.labels.sum(axis=0, dtype=int).tolist(),
    }
    if run.splits.is_file():
        earlier = json.loads(run.splits.read_text(encoding="utf-8"))
        if earlier["splits_sha256"] != splits.fingerprint:
            raise BadConfig(
                f"the run in {run.folder} was made with other splits (SHA-256 {earlier['splits_sha256'][:12]}..., now "
                f"{splits.fingerprint[:12]}...): restore the data set, or choose another folder with --out"
            )
        return
    write_atomically(run.splits, json.dumps(described, indent=2).encode())
