"""A run folder: what a training run writes, and what it needs to resume.

config.json         the configuration, as checked
.lock               held by the process that trains
environment.json    versions, device, git state and command line of each start
splits.json         sizes, labels and SHA-256 of the data set
log.jsonl           one line per epoch
tensorboard/        the same as curves for TensorBoard
report.md, .html    one page about the run, with curves.svg
state.pt            weights, optimizer, log and best score after the last finished epoch
best.safetensors    checkpoint of the best epoch on the validation part
last.safetensors    checkpoint of the last epoch
epoch-5.safetensors checkpoint of an epoch, if tracking.keep_every is set
"""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import torch

from hashseek.retrieval.errors import BadConfig, first_line
from hashseek.retrieval.files import write_atomically
from hashseek.training.config import Config


class Run:
    """Paths in a run folder; see above for their content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.json"
        self.environment = folder / "environment.json"
        self.splits = folder / "splits.json"
        self.tensorboard = folder / "tensorboard"
        self.report = folder / "report.md"
        self.curves = folder / "curves.svg"
        self.log = folder / "log.jsonl"
        self.state = folder / "state.pt"
        self.best = folder / "best.safetensors"
        self.last = folder / "last.safetensors"

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def epoch(self, number: int) -> Path:
        """The checkpoint of an epoch, counted from 1."""
        return self.folder / f"epoch-{number}.safetensors"

    def epochs(self) -> list[Path]:
        """The checkpoints of epochs that there are."""
        return list(self.folder.glob("epoch-*.safetensors"))


def saved_state(run: Run, config: Config, *, resume: bool) -> dict[str, Any] | None:
    """The state that a resumed run continues from; None for a new run. Changes nothing.

    Raises:
        BadConfig: see `_check_run`, or the state is damaged.
    """
    _check_run(run, config, resume=resume)
    return _load_state(run.state) if run.config.is_file() and run.state.is_file() else None


def _check_run(run: Run, config: Config, *, resume: bool) -> None:
    """Raise `BadConfig` if the folder holds a run and `resume` is not set, or a run with another configuration."""
    if not run.config.is_file():
        return
    if not resume:
        raise BadConfig(f"{run.folder} already holds a run: continue it with --resume, or choose another --out")
    try:
        earlier, now = dict(json.loads(run.config.read_text(encoding="utf-8"))), config.model_dump(mode="json")
        # Neither how a run is followed nor how many processes share its work changes the result.
        earlier["tracking"] = now["tracking"]
        earlier["train"]["devices"] = config.train.devices
    except (ValueError, TypeError, KeyError) as error:
        raise BadConfig(f"{run.config} is damaged ({error}): delete the folder and train again") from None
    changes = differences(earlier, now)
    if changes:
        raise BadConfig(
            f"the run in {run.folder} has another configuration ({'; '.join(changes)}): resume with the same one "
            "and the same version of Hashseek, or choose another folder with --out"
        )


@contextmanager
def started(run: Run, config: Config, *, resume: bool) -> Iterator[None]:
    """Create the folder with its configuration, unless a resumed run is in it, and keep other processes out.

    Raises:
        BadConfig: another process is training in the folder, or has started a run there since `saved_state` looked.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with in_use(run.folder):
        _check_run(run, config, resume=resume)
        if not run.config.is_file():
            write_atomically(run.config, json.dumps(config.model_dump(mode="json"), indent=2).encode())
        yield


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder of runs; the lock ends with the process, however it ends.

    Raises:
        BadConfig: another process is working in it.
    """
    try:
        with filelock.FileLock(folder / ".lock", blocking=False):
            yield
    except filelock.Timeout:
        raise BadConfig(f"another process is working in {folder}: wait until it is done, or choose another") from None


def save_state(run: Run, state: dict[str, Any]) -> None:
    """Write the state atomically: a run killed at any moment finds the previous state or this one."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(run.state, buffer.getvalue())


def write_records(file: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write all records, one JSON object per line."""
    write_atomically(file, "".join(json.dumps(record) + "\n" for record in records).encode())


def read_records(file: Path) -> list[dict[str, Any]]:
    """The records in the file; none if it is missing."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def _load_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a torn file raises nearly anything
        raise BadConfig(f"{path} is damaged ({first_line(error)}): delete the folder and train again") from None
    return state


def write_or_check(file: Path, what: dict[str, Any]) -> None:
    """Write what the runs in a folder have in common, or check that it is as before.

    Raises:
        BadConfig: it is not, so the runs could not be compared.
    """
    if not file.is_file():
        write_atomically(file, json.dumps(what, indent=2).encode())
    elif changes := differences(json.loads(file.read_text(encoding="utf-8")), json.loads(json.dumps(what))):
        more = [f"and {len(changes) - 5} more"] if len(changes) > 5 else []
        shown = "; ".join([*changes[:5], *more])
        raise BadConfig(
            f"{file.parent} holds runs with other settings or data ({shown}): use the same ones and the same version "
            "of Hashseek, or choose another folder with --out"
        )


def differences(earlier: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """The changes from `earlier` to `now`, as texts such as "train.seed was 0 and is 1"."""
    found = []
    for key in dict.fromkeys((*earlier, *now)):
        old, new = earlier.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key} was {old!r} and is {new!r}")
    return found
