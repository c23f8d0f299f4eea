"""The checkpoints of an evaluation: one, several on the same queries and database, or the lengths of a nested one."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from hashseek.retrieval.checkpoint import Checkpoint, Header, load_checkpoint
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.truncation import lengths_of, truncate

_OF_RUNS = ("seed", "device", "devices", "cache", "cache_gib")  # settings that differ between runs of one method


@dataclass(frozen=True)
class Candidate:
    """A checkpoint and the name of its file; for a shorter code, `cut_from` is the full length of the nested code."""

    name: str
    checkpoint: Checkpoint
    cut_from: int | None = None

    @property
    def header(self) -> Header:
        """The header, at this length."""
        return self.checkpoint.header

    @property
    def held_out(self) -> tuple[str, ...]:
        """The labels that were never used in its training."""
        return tuple(self.header.training.get("held_out", ()))


def method_of(header: Header) -> str:
    """What a checkpoint was trained with: the loss and its partner, the backbone, and whether that was frozen."""
    training = header.training
    if "fit" in training:
        return f"{training['fit']['method']} without labels, {header.backbone}"
    loss = training.get("loss") or {}
    partner = training.get("partner")
    frozen = (training.get("model") or {}).get("freeze_backbone")
    losses = str(loss.get("name", "unknown loss")) + (f" + {partner['name']}" if partner else "")
    words = [losses, header.backbone]
    return ", ".join(words + ["frozen"] * bool(frozen) + ["nested"] * bool(loss.get("nested")))


def method_names(headers: Sequence[Header]) -> list[str]:
    """The method of each checkpoint, with a number from 2 where an earlier one of its length has other settings.

    Checkpoints of one name and length differ only in what differs between runs, such as the seed. Settings keep their
    number from length to length where it is free.
    """
    numbers: dict[tuple[str, int], dict[str | None, int]] = {}  # of the settings, by method and length
    latest: dict[tuple[str, str | None], int] = {}
    names = []
    for header in headers:
        method, settings = method_of(header), settings_hash(header, with_length=False)
        of_length = numbers.setdefault((method, header.n_bits), {})
        if settings not in of_length:
            wanted = chain([latest.get((method, settings), 1)], count(1))
            of_length[settings] = next(n for n in wanted if n not in of_length.values())
        number = latest[method, settings] = of_length[settings]
        names.append(method if number == 1 else f"{method} ({number})")
    return names


def settings_hash(header: Header, *, with_length: bool = True) -> str | None:
    """SHA-256 over the training configuration without settings that may differ between runs; None if there is none.

    That is the seed, the machine, where the data set is (its splits have a hash of their own) and logging; and the code
    length unless `with_length` is set.
    """
    training = dict(header.training)
    if "train" not in training:
        return None
    training["train"] = {key: value for key, value in training["train"].items() if key not in _OF_RUNS}
    training["data"] = {key: value for key, value in (training.get("data") or {}).items() if key != "root"}
    training.pop("tracking", None)
    if not with_length:
        training["model"] = {key: value for key, value in (training.get("model") or {}).items() if key != "n_bits"}
    return hashlib.sha256(json.dumps(training, sort_keys=True).encode()).hexdigest()


def load_candidates(paths: Sequence[Path], *, lengths: bool = False) -> list[Candidate]:
    """Load the checkpoints in order; with `lengths`, each nested one is followed by its shorter codes, longest first.

    Raises:
        BadCheckpoint: a checkpoint cannot be read.
        BadConfig: `lengths` is set but none is nested, or the held-out labels differ.
    """
    found: list[Candidate] = []
    for path in paths:
        checkpoint = load_checkpoint(path)
        found.append(Candidate(str(path), checkpoint))
        shorter = lengths_of(checkpoint)[:-1] if lengths else ()
        n_bits = checkpoint.header.n_bits
        found += [Candidate(str(path), truncate(checkpoint, length), n_bits) for length in reversed(shorter)]
    if lengths and len(found) == len(paths):
        names = ", ".join(str(path) for path in paths)
        raise BadConfig(f"--lengths needs a nested code, but {names} was not trained with loss.nested")
    first = found[0]
    for other in found[1:]:
        if other.held_out != first.held_out:
            one, two = (", ".join(each.held_out) or "none" for each in (first, other))
            raise BadConfig(
                f"{first.name} and {other.name} were trained with different held-out labels ({one}; {two}): evaluate "
                "them separately"
            )
    return found
