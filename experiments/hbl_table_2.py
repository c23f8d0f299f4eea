"""The run behind `python -m experiments hbl-table-2`: for each data set and method a search on the training split, then
training with the chosen settings and scoring on the query split, once per seed.

A run folder has one folder per data set, so that two processes can work on two data sets:

protocol.json    data and folds of the search
trials.sqlite3   every trial of the search
rows.jsonl       one line per finished seed, with its scores on the query split
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from zlib import crc32

import optuna
from optuna.trial import FrozenTrial, TrialState

from experiments import hbl
from hashseek.retrieval.errors import BadConfig
from hashseek.training.data.splits import Splits
from hashseek.training.runs.run_folder import in_use, read_records, write_or_check, write_records
from hashseek.training.sweep import RANDOM_TRIALS, Report, open_study, run_trials

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
    """Finish the search and the seeds of `methods` on the data set `data`, continuing what is in `folder`.

    The search uses only the training split. A method with margins is also trained with its chosen settings and
    lam = 0, to separate the effect of the margins from that of the settings.

    Raises:
        BadConfig: another process is working on this data set in the folder, or earlier trials had other data or folds.
    """
    place = folder / data
    place.mkdir(parents=True, exist_ok=True)
    with in_use(place):
        write_or_check(place / "protocol.json", {"data": splits.fingerprint, "folds": n_folds})
        for method in methods:
            best = _search(place, splits, method, n_trials=n_trials, n_folds=n_folds, say=say)
            variants = {"": best.user_attrs["settings"]}
            if "lam" in variants[""]:
                variants[MARGINS_OFF] = {**variants[""], "lam": 0.0}
            for seed in range(n_seeds):
                for variant, settings in variants.items():
                    key = {"data": data, "method": method, "variant": variant, "seed": seed, "trial": best.number}
                    rows = read_records(rows_file(folder, data))
                    if any(all(row[name] == value for name, value in key.items()) for row in rows):
                        continue
                    choice = hbl.CrossValidation(**best.user_attrs["choice"])
                    found = hbl.query_scores(splits, method=method, settings=settings, choice=choice, seed=seed)
                    rows.append({**key, "settings": settings, "choice": asdict(choice), "figures": found})
                    write_records(rows_file(folder, data), rows)
                    name = f"{data} {method} {variant}".strip()
                    say(f"{name} seed {seed}: p@1 {found['folds']['p@1']:.4f}, mAP {found['folds']['mAP']:.4f}")


def rows_file(folder: Path, data: str) -> Path:
    """The finished seeds of a data set, one per line."""
    return folder / data / "rows.jsonl"


def _search(
    place: Path, splits: Splits, method: str, *, n_trials: int, n_folds: int, say: Callable[[str], None]
) -> FrozenTrial:
    """The best of `n_trials` settings, cross-validated on the training split; finished trials are not repeated."""
    study = open_study(place / "trials.sqlite3", method, optuna.pruners.MedianPruner(n_startup_trials=RANDOM_TRIALS))
    if not study.get_trials(deepcopy=False):
        study.enqueue_trial(hbl.defaults(method))

    def objective(trial: optuna.Trial, report: Report) -> float:
        settings = hbl.suggest(trial, method)
        choice = hbl.cross_validate(splits.train, method=method, settings=settings, n_folds=n_folds, report=report)
        trial.set_user_attr("settings", settings)
        trial.set_user_attr("choice", asdict(choice))
        return choice.score

    for trial, outcome in run_trials(study, n_trials, objective, seed=crc32(method.encode())):
        say(f"{place.name} {method}: trial {trial.number + 1} of {n_trials}: {outcome}")
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        raise BadConfig(f"all {n_trials} trials of {method} failed: increase --trials")
    return study.best_trial
