"""Several checkpoints, or the lengths of nested ones, on the same queries and database: mAP by code length."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hashseek.retrieval.checkpoint import Checkpoint, Header, digest_weights, load_checkpoint
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.models.truncation import lengths_of, truncate


@dataclass(frozen=True)
class Candidate:
    """A checkpoint and the name of its file; `cut_from` is the length of the nested code whose first bits it gives."""

    name: str
    checkpoint: Checkpoint
    cut_from: int | None = None

    @property
    def header(self) -> Header:
        """Of the checkpoint, at this length."""
        return self.checkpoint.header

    @property
    def held_out(self) -> tuple[str, ...]:
        """Labels that its training never saw."""
        return tuple(self.header.training.get("held_out", ()))


def load_candidates(paths: Sequence[Path], *, lengths: bool = False) -> list[Candidate]:
    """The checkpoints in the order given; with `lengths`, behind each nested one its shorter codes, longest first.

    Raises:
        BadCheckpoint: one cannot be read. BadConfig: one is given twice, or `lengths` where none is nested.
    """
    found: list[Candidate] = []
    for path in paths:
        checkpoint = load_checkpoint(path)
        found.append(Candidate(str(path), checkpoint))
        shorter = lengths_of(checkpoint)[:-1] if lengths else ()
        own = checkpoint.header.n_bits
        found += [Candidate(str(path), truncate(checkpoint, n_bits), own) for n_bits in reversed(shorter)]
    if lengths and len(found) == len(paths):
        names = ", ".join(str(path) for path in paths)
        raise BadConfig(f"--lengths shows the lengths of a nested code, but {names} was not trained with loss.nested")
    of_fingerprint: dict[str, Candidate] = {}
    for each in found:
        same = of_fingerprint.setdefault(each.header.fingerprint, each)
        if same is not each:
            raise BadConfig(f"{same.name} and {each.name} give the same codes of {each.header.n_bits} bits: name one")
    return found


def held_out_of_all(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """The labels that were held out of training.

    Raises:
        BadConfig: not the same of all.
    """
    first = candidates[0]
    for other in candidates[1:]:
        if other.held_out != first.held_out:
            told = [", ".join(each.held_out) or "nothing" for each in (first, other)]
            raise BadConfig(
                f"{first.name} was trained without {told[0]} and {other.name} without {told[1]}: their figures do not "
                "compare, evaluate them apart"
            )
    return first.held_out


def on_one_backbone(candidates: Sequence[Candidate]) -> list[list[int]]:
    """Positions of the candidates, those together whose features are the same and have to be computed once only."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, each in enumerate(candidates):
        weights = digest_weights(each.checkpoint.model.backbone)
        groups.setdefault((each.header.backbone, each.header.preprocessing, weights), []).append(place)
    return list(groups.values())


def method_of(candidate: Candidate) -> str:
    """What trained it: loss and backbone, and whether that was frozen."""
    training = candidate.header.training
    loss = training.get("loss") or {}
    words = [str(loss.get("name", "unknown loss")), candidate.header.backbone]
    if (training.get("model") or {}).get("freeze_backbone"):
        words.append("frozen")
    if loss.get("nested"):
        words.append("nested")
    return ", ".join(words)
