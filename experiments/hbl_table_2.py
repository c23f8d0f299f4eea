"""The run behind `python -m experiments hbl-table-2`: for each data set and method a search on the training split, then
the chosen settings on the query split, once a seed.

A run folder holds one folder per data set, so that two processes can work on two of them:

trials.sqlite3   every trial of the search
rows.jsonl       one line per finished seed, with its figures on the query split
"""

import fcntl
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optuna import TrialPruned
from optuna.trial import FrozenTrial, Trial

from experiments import hbl
from experiments.search import search
from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.files import write_atomically
from hashseek.training.data.splits import Splits

MARGINS_OFF = "margins off"


def run(
    folder: Path,
    data: str,
    splits: Splits,
    *,
    methods: Sequence[str],
    n_trials: int,
    n_seeds: int,
    n_folds: int,
    say: Callable[[str], None],
) -> None:
    """Finish the search and the seeds of `methods` on the data set `data`, going on from what `folder` holds.

    The search sees nothing but the training split. A method with margins is also trained with its chosen settings and
    lam = 0, so that what the margins do can be told from what the settings do.

    Raises:
        BadConfig: another process works on this data set in this folder, or earlier trials had another protocol.
    """
    place = folder / data
    place.mkdir(parents=True, exist_ok=True)
    with _alone(place):
        for method in methods:
            best = _best(place, splits, method, n_trials=n_trials, n_folds=n_folds, say=say)
            chosen = best.user_attrs["settings"]
            for seed in range(n_seeds):
                _finish(place, splits, data, method, best, chosen, seed, variant="", say=say)
                if "lam" in chosen:
                    off = {**chosen, "lam": 0.0}
                    _finish(place, splits, data, method, best, off, seed, variant=MARGINS_OFF, say=say)


def read_rows(folder: Path, data: str) -> list[dict[str, Any]]:
    """The finished seeds of a data set; a line cut off by a crash is left out."""
    file = folder / data / "rows.jsonl"
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _best(
    place: Path, splits: Splits, method: str, *, n_trials: int, n_folds: int, say: Callable[[str], None]
) -> FrozenTrial:
    train = splits.train
    vectors = hbl.vectors_of(train)

    def objective(trial: Trial) -> float:
        settings = hbl.suggest(trial, method)

        def report(fold: int, score: float) -> None:
            trial.report(score, fold)
            if fold + 1 < n_folds and trial.should_prune():
                raise TrialPruned

        choice = hbl.cross_validate(
            vectors, train.labels, method=method, settings=settings, n_folds=n_folds, report=report
        )
        trial.set_user_attr("settings", settings)
        trial.set_user_attr("choice", asdict(choice))
        return choice.score

    return search(
        place / "trials.sqlite3",
        method,
        objective,
        n_trials=n_trials,
        seed=0,
        first=hbl.defaults(method),
        protocol={"data": splits.fingerprint, "folds": n_folds},
        say=lambda line: say(f"{place.name} {line}"),
    )


def _finish(
    place: Path,
    splits: Splits,
    data: str,
    method: str,
    best: FrozenTrial,
    settings: dict[str, Any],
    seed: int,
    *,
    variant: str,
    say: Callable[[str], None],
) -> None:
    """Add the row of one seed, unless it is there already."""
    key = {"data": data, "method": method, "variant": variant, "seed": seed, "trial": best.number}
    rows = read_rows(place.parent, data)
    if any(all(row.get(name) == value for name, value in key.items()) for row in rows):
        return
    choice = hbl.Choice(**best.user_attrs["choice"])
    found = hbl.query_figures(splits, method=method, settings=settings, choice=choice, seed=seed)
    row = {**key, "settings": settings, "choice": asdict(choice), "figures": found}
    text = "".join(json.dumps(line) + "\n" for line in [*rows, row])
    write_atomically(place / "rows.jsonl", text.encode())
    say(
        f"{data} {method} {variant}{' ' if variant else ''}seed {seed}: p@1 {found['folds']['p@1']:.4f}, "
        f"mAP {found['folds']['mAP']:.4f}"
    )


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Hold the folder of a data set for this process; the lock goes with the process, however it ends."""
    with (place / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadConfig(
                f"another process is working on {place.name} in {place.parent}: wait for it, or name another folder "
                "with --out"
            ) from None
        yield
