"""A search over settings with Optuna, for `hashseek sweep`: each trial is a run, scored on the validation part.

    FOLDER/sweep.json       what is searched, and from which configuration
    FOLDER/sweep.db         Optuna's storage (SQLite)
    FOLDER/trials/0007/     run folder of a trial; only the best trial keeps its weights
    FOLDER/best.toml        the configuration with the best values
    FOLDER/trials.csv       every trial: outcome, score, epochs, seconds, values

A sweep that was killed continues when it is started again. The interrupted trial resumes at its last epoch, and later
trials are the same as in an uninterrupted sweep: each is drawn by its own sampler, seeded with (seed of the
sweep, number), from the results of the trials before it, which the storage has.
`open_study` and `run_trials` also serve searches that do not train with `fit` (experiments/).
"""

import json
import math
import shlex
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import tomli_w
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.pool import NullPool

from hashseek.retrieval.errors import BadCodes, BadConfig, HashseekError
from hashseek.retrieval.files import as_csv, write_atomically
from hashseek.training.config import parse_config, with_values
from hashseek.training.data.datasets import build_splits
from hashseek.training.loop.epoch import Diverged, OutOfMemory
from hashseek.training.loop.fit import fit
from hashseek.training.progress import Progress
from hashseek.training.runs.run_folder import Run, in_use, read_records, write_or_check
from hashseek.training.sweep_space import Distributions, check_space, parse_space

# Trials drawn at random before the sampler models the results, and trials that finish before any is pruned. They must
# not depend on the number of trials, or an extended sweep would differ from a longer one; and they must be small enough
# for short sweeps to learn.
RANDOM_TRIALS = 4
UNPRUNED_TRIALS = 4
# Share of the epochs that every trial gets: early in a schedule, the order of trials is not informative.
UNPRUNED_EPOCHS = 0.3

Report = Callable[[int, float, int], None]
"""Reports (step, score, number of steps of this trial) after a step, counted from 1."""


@dataclass(frozen=True)
class Scored:
    """A trial that has a score: its settings by name, its validation score and its number."""

    overrides: dict[str, Any]
    score: float
    trial: int

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides for `load_config`, such as optimizer.lr=0.01."""
        return tuple(f"{name}={json.dumps(value)}" for name, value in self.overrides.items())


def sweep(
    config_content: Mapping[str, Any],
    *,
    folder: Path,
    progress: Progress | None = None,
    source: str = "the configuration",
) -> list[Scored]:
    """Run the trials of the section [sweep] and return those with a score, the best first.

    Continues the sweep in `folder` if there is one. A trial is pruned if its best validation mAP so far is below the
    median of finished trials at the same epoch.

    Args:
        config_content: the sections of a configuration, as `read_config` returns them.
        folder: where everything is stored.
        progress: where progress is printed.
        source: the name of the configuration in messages.

    Raises:
        BadConfig: bad ranges or settings, a folder that holds something else, or no trial that finished.
        HashseekError: see `fit` and `run_trials`.
    """
    progress = progress or Progress(quiet=True)
    config = parse_config(dict(config_content), source=source)
    content = {key: value for key, value in config_content.items() if key != "sweep"}
    settings = config.sweep
    distributions = parse_space(settings.space)
    check_space(content, distributions, source=source)
    if config.train.devices > 1:
        raise BadConfig(f"train.devices is {config.train.devices}, but a sweep trains in one process: set it to 1")
    splits = build_splits(config.data.name, **config.data.options())
    searched = settings.model_dump(include={"space", "seed", "prune"})
    # With all defaults, so that no sweep mixes trials from before and after a change of one.
    what = {
        "config": config.model_dump(mode="json", exclude={"sweep"}),
        **searched,
        "splits_sha256": splits.fingerprint,
    }

    def objective(trial: optuna.Trial, report: Report) -> float:
        values = {name: trial._suggest(name, one) for name, one in distributions.items()}
        run = _run_of(trial, folder)

        try:
            of_trial = parse_config(with_values(content, values.items()), source="its settings")

            def on_epoch(record: dict[str, Any]) -> None:
                report(record["epoch"], record[f"val_mAP@{config.train.val_n}"], of_trial.train.epochs)

            for record in read_records(run.log):
                on_epoch(record)
            resume = run.config.is_file()
            return fit(of_trial, out=run.folder, resume=resume, on_epoch=on_epoch, splits=splits).best_score
        except (Diverged, OutOfMemory):
            raise
        except HashseekError as error:
            raise type(error)(f"trial {trial.number} of the sweep ({_shown(values)}): {error}") from None

    folder.mkdir(parents=True, exist_ok=True)
    with in_use(folder):
        if not (folder / "sweep.json").is_file() and any(path.name != ".lock" for path in folder.iterdir()):
            raise BadConfig(f"{folder} holds files that are not a sweep: choose another folder with --out")
        write_or_check(folder / "sweep.json", what)
        n_unpruned = math.ceil(UNPRUNED_EPOCHS * config.train.epochs)
        median = optuna.pruners.MedianPruner(UNPRUNED_TRIALS, n_unpruned + 1)  # steps are epochs from 1
        study = open_study(folder / "sweep.db", "sweep", median if settings.prune else optuna.pruners.NopPruner())
        for trial, outcome in run_trials(study, settings.trials, objective, seed=settings.seed):
            progress.console.print(f"trial {trial.number}  {_shown(trial.params)}  {outcome}", markup=False)
            _drop_weights(study, folder)
        _drop_weights(study, folder)  # in case a process was killed just after its last trial
        score_name = f"validation mAP@{config.train.val_n}"
        _write_trials(study, distributions, folder, score_name)
        scored = _scored(study)
        _write_best(study, distributions, content, scored[0], folder, score_name)
    return scored


def open_study(storage: Path, name: str, pruner: optuna.pruners.BasePruner) -> optuna.Study:
    """The study `name` in the SQLite file `storage`, created if missing; higher scores are better."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(storage, timeout=60, check_same_thread=False)
        # Not synced at every epoch: after a power loss the file is still consistent, and the logs have what it lacks.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    # Without a pool, each connection is closed after use; optuna never closes those of a pool.
    engine = {"creator": connect, "poolclass": NullPool}
    return optuna.create_study(
        study_name=name,
        storage=optuna.storages.RDBStorage(f"sqlite:///{storage}", engine_kwargs=engine),
        direction="maximize",
        pruner=pruner,
        load_if_exists=True,
    )


def run_trials(
    study: optuna.Study, n_trials: int, objective: Callable[[optuna.Trial, Report], float], *, seed: int
) -> Iterator[tuple[optuna.Trial, str]]:
    """Run trials until there are `n_trials`, an interrupted one first; yields each with its outcome in words.

    Searches with different seeds draw independently of each other. A trial that diverges or runs out of memory does not
    raise, but counts as the worst.

    Args:
        study: what `open_study` returned.
        n_trials: number of trials, finished ones included.
        objective: returns the score of a trial, and calls a `Report` after each step, which ends the trial if it should
            be pruned.
        seed: seed of the settings.
    """

    def report(trial: optuna.Trial, reported: Collection[int], step: int, score: float, n_steps: int) -> None:
        if step not in reported:
            trial.report(score, step)
        # Optuna decides on the last reported step, which is later than this one where a log is replayed.
        if max({step, *reported}) < n_steps and trial.should_prune():
            raise optuna.TrialPruned

    while (trial := _next_trial(study, n_trials, seed=seed)) is not None:
        # Steps that an interrupted process has reported: Optuna accepts each once.
        reported = set(study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        try:
            score = objective(trial, partial(report, trial, reported))
        except optuna.TrialPruned:
            study.tell(trial, state=TrialState.PRUNED)
            yield trial, "pruned"
        except (BadCodes, Diverged, OutOfMemory) as error:
            trial.set_user_attr("reason", str(error))
            study.tell(trial, state=TrialState.PRUNED)
            yield trial, f"failed: {error}"
        else:
            study.tell(trial, score)
            yield trial, f"score {score:.4f}"


def _next_trial(study: optuna.Study, n_trials: int, *, seed: int) -> optuna.Trial | None:
    """The interrupted trial if there is one, else a new one; None when there are `n_trials`."""
    trials = study.get_trials(deepcopy=False)
    interrupted = [trial for trial in trials if trial.state == TrialState.RUNNING]
    number = interrupted[0].number if interrupted else sum(trial.state != TrialState.WAITING for trial in trials)
    if not interrupted and number >= n_trials:
        return None
    drawn = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
    study.sampler = optuna.samplers.TPESampler(seed=drawn, n_startup_trials=RANDOM_TRIALS)
    return optuna.Trial(study, interrupted[0]._trial_id) if interrupted else study.ask()


def _drop_weights(study: optuna.Study, folder: Path) -> None:
    """Keep only the weights of the best trial: a hundred ResNet-50s would fill a disk."""
    for i, trial in enumerate(_ranked(study)):
        run = _run_of(trial, folder)
        for file in (run.state, run.last, *run.epochs(), *([run.best] if i else [])):
            file.unlink(missing_ok=True)


def _scored(study: optuna.Study) -> list[Scored]:
    trials = _ranked(study)
    scored = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if not scored:
        reason = trials[0].user_attrs.get("reason", "it was pruned")
        raise BadConfig(f"none of the {len(trials)} trials has a score: change the ranges; the first: {reason}")
    return [Scored(dict(one.params), _score(one), one.number) for one in scored]


def _run_of(trial: optuna.Trial | FrozenTrial, folder: Path) -> Run:
    return Run(folder / "trials" / f"{trial.number:04}")


def _write_best(
    study: optuna.Study, space: Distributions, content: dict[str, Any], best: Scored, folder: Path, score_name: str
) -> None:
    header = (
        f"# Best of {len(study.get_trials(deepcopy=False))} trials over {', '.join(space)}:\n"
        f"# {score_name} {best.score:.4f} in trial {best.trial}.\n"
        f"#\n# command:   {shlex.join(['hashseek', 'train', str(folder / 'best.toml')])}\n\n"
    )
    best_content = tomli_w.dumps(with_values(content, best.overrides.items()))
    write_atomically(folder / "best.toml", (header + best_content).encode())


def _write_trials(study: optuna.Study, space: Distributions, folder: Path, score_name: str) -> None:
    score_column = score_name.replace(" ", "_")
    rows: list[list[object]] = [["trial", "outcome", score_column, "epochs", "seconds", *space, "reason"]]
    for trial in study.get_trials(deepcopy=False):
        value = trial.value if trial.state == TrialState.COMPLETE else None
        seconds = f"{sum(record['seconds'] for record in read_records(_run_of(trial, folder).log)):.1f}"
        parameters = [trial.params.get(name) for name in space]
        reason = trial.user_attrs.get("reason", "")
        epochs = len(trial.intermediate_values)
        rows.append([trial.number, _outcome(trial), value, epochs, seconds, *parameters, reason])
    write_atomically(folder / "trials.csv", as_csv(rows))


def _score(trial: FrozenTrial) -> float:
    return float(trial.value) if trial.state == TrialState.COMPLETE and trial.value is not None else -math.inf


def _ranked(study: optuna.Study) -> list[FrozenTrial]:
    """All trials, the best first; in the order in which they ran if their scores are the same."""
    return sorted(study.get_trials(deepcopy=False), key=_score, reverse=True)


def _outcome(trial: FrozenTrial) -> str:
    return "failed" if "reason" in trial.user_attrs else {TrialState.COMPLETE: "scored"}.get(trial.state, "pruned")


def _shown(values: Mapping[str, Any]) -> str:
    texts = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in values.items()}
    return ", ".join(f"{name} = {text}" for name, text in texts.items())
