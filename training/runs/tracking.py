"""Further output of a run, in addition to log and checkpoints: TensorBoard, the run report, data and environment."""

import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import write_atomically
from hashseek.training.config import Config
from hashseek.training.data.batches import TrainingData
from hashseek.training.data.splits import Splits
from hashseek.training.runs.environment import environment
from hashseek.training.runs.run_folder import Run, differences
from hashseek.training.runs.run_report import write_report

Record = dict[str, Any]

# A report takes longer to write than an epoch on a frozen backbone.
SECONDS_BETWEEN_REPORTS = 30.0


class Tracker:
    """Writes each epoch to TensorBoard and into the run report, for as long as it is open as a context manager."""

    def __init__(self, run: Run, config: Config, records: Sequence[Record]) -> None:
        self._run, self._config = run, config
        self._records = list(records)
        self._reported = time.monotonic()
        self._writer: Any = None
        if config.tracking.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard then ignores what an interrupted process wrote for later epochs.
            self._writer = SummaryWriter(str(run.tensorboard), purge_step=len(records) + 1)

    def __enter__(self) -> "Tracker":
        return self

    def epoch(self, record: Record) -> None:
        """Write a finished epoch; the report is updated less often."""
        self._records.append(record)
        if self._writer is not None:
            for name, value in scalars(record).items():
                self._writer.add_scalar(name, value, record["epoch"])
            self._writer.flush()
        if time.monotonic() - self._reported > SECONDS_BETWEEN_REPORTS:
            write_report(self._run, self._config, self._records)
            self._reported = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._records:
            write_report(self._run, self._config, self._records)
        if self._writer is not None:
            self._writer.close()


def scalars(record: Record) -> dict[str, float]:
    """The values of an epoch by their names in TensorBoard."""
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


def check_images(run: Run, splits: Splits, data: TrainingData) -> None:
    """Raise `BadConfig` if the resumed run was trained on other splits, or on another part of the training split."""
    now = _images_of(splits, data)  # an image that has become unreadable moves the validation part
    earlier = json.loads(run.splits.read_text(encoding="utf-8"))
    if changes := differences({key: earlier[key] for key in now}, now):
        raise BadConfig(
            f"the run in {run.folder} was trained on other images or labels ({'; '.join(changes)}): restore the data "
            "set, or choose another folder with --out"
        )


def _images_of(splits: Splits, data: TrainingData) -> dict[str, Any]:
    """What identifies the images that a run learns from and validates on."""
    of_train = {"learnt_from": len(data.fit_rows), "validated_on": len(data.val_rows)}
    return {"splits_sha256": splits.fingerprint, "of_train": of_train}


def write_start(
    run: Run, config: Config, splits: Splits, data: TrainingData, *, device: torch.device, first_epoch: int
) -> None:
    """Write splits.json, and add this start of the run to environment.json."""
    described = {
        "data": config.data.model_dump(mode="json", exclude_defaults=True),
        **_images_of(splits, data),
        "sizes": {"train": len(splits.train), "query": len(splits.query), "database": len(splits.database)},
        "label_names": list(splits.label_names),
        "train_images_per_label": splits.train.labels.sum(axis=0, dtype=int).tolist(),
    }
    write_atomically(run.splits, json.dumps(described, indent=2).encode())
    starts = json.loads(run.environment.read_text(encoding="utf-8")) if run.environment.is_file() else []
    computed = environment(device, devices=config.train.devices)
    starts.append({"first_epoch": first_epoch, **computed, "features_computed_in": data.source.engine})
    write_atomically(run.environment, json.dumps(starts, indent=2).encode())
