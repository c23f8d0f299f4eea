"""A search over settings with Optuna, kept in a SQLite file and resumable at trial level.

Each trial draws from (seed, number of trials before it) and never from a running generator: a search that was killed
and goes on tries the same settings as an unbroken one.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from hashseek.retrieval.errors import BadConfig, HashseekError

N_RANDOM = 4  # trials before the sampler and the pruner begin to learn from earlier ones


def search(
    storage: Path,
    name: str,
    objective: Callable[[Trial], float],
    *,
    n_trials: int,
    seed: int,
    first: Mapping[str, Any],
    protocol: Mapping[str, Any],
    say: Callable[[str], None],
) -> FrozenTrial:
    """The best of `n_trials` trials, of which those already in `storage` are not made again.

    Trials are drawn by TPE after `N_RANDOM` and given up by the median rule; both count, and so does a trial whose
    training diverged. One that was interrupted does not.

    Args:
        storage: SQLite file; made if missing.
        name: of the study in it.
        objective: of a trial; greater is better. It may report values along the way, and raise `optuna.TrialPruned`.
        n_trials: budget, trials of earlier runs included.
        seed: of the sampler.
        first: settings of the first trial.
        protocol: what the trials depend on besides their settings; must be the same when a search goes on.
        say: told a line per trial.

    Raises:
        BadConfig: `storage` holds a study of another protocol, or every trial diverged.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage.parent.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=optuna.storages.RDBStorage(f"sqlite:///{storage}"),
        study_name=name,
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=N_RANDOM),
    )
    _check_protocol(study, storage, protocol)
    for left in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(left.number, state=TrialState.FAIL)  # its run was killed
    while (number := len(finished(study))) < n_trials:
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=N_RANDOM, seed=seed * 1_000_003 + number)
        if number == 0 and not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            study.enqueue_trial(dict(first))
        trial = study.ask()
        try:
            value = objective(trial)
        except optuna.TrialPruned:
            study.tell(trial, state=TrialState.PRUNED)
            say(f"{name}: trial {number + 1} of {n_trials} given up")
        except HashseekError as error:
            trial.set_user_attr("diverged", str(error))
            study.tell(trial, state=TrialState.FAIL)
            say(f"{name}: trial {number + 1} of {n_trials} failed: {error}")
        else:
            study.tell(trial, value)
            say(f"{name}: trial {number + 1} of {n_trials} scored {value:.4f}, best {study.best_value:.4f}")
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        raise BadConfig(f"all {n_trials} trials of {name} failed: allow more trials")
    return study.best_trial


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that count: complete, given up, or diverged."""
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) or "diverged" in trial.user_attrs
    ]


def _check_protocol(study: optuna.Study, storage: Path, protocol: Mapping[str, Any]) -> None:
    earlier = study.user_attrs.get("protocol")
    if earlier is None:
        study.set_user_attr("protocol", dict(protocol))
        return
    for key, value in protocol.items():
        if earlier.get(key) != value:
            raise BadConfig(
                f"the trials in {storage} were made with {key} {earlier.get(key)!r}, not {value!r}: go on as they "
                "began, or name another folder with --out"
            )
