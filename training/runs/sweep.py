"""A search over settings: trials drawn by Optuna, each a run of its own, scored on the validation part.

    FOLDER/sweep.json       what is searched, and from which configuration
    FOLDER/sweep.db         Optuna's storage (SQLite)
    FOLDER/trials/0007/     run folder of a trial; only the best one keeps its weights
    FOLDER/best.toml        the configuration with the best values
    FOLDER/trials.csv, sweep.svg

A sweep that was killed goes on when it is started again: the trial it was in is resumed at its last epoch, and those
that follow are what they would have been, since each is drawn from (seed, number, trials before it).
"""

import copy
import csv
import fcntl
import io
import json
import math
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from rich.table import Table

from hashseek.retrieval.errors import BadConfig, HashseekError
from hashseek.retrieval.files import write_atomically
from hashseek.training.config import Config, parse_config
from hashseek.training.plotting import Panel, Series, draw
from hashseek.training.loop.epoch import Diverged, OutOfMemory
from hashseek.training.loop.fit import Stop, fit
from hashseek.training.runs.progress import Progress
from hashseek.training.runs.run_folder import Run, differences, read_log
from hashseek.training.runs.sweep_space import Distributions, Space, check_space, parse_space, with_values
from hashseek.training.runs.toml_text import as_toml, as_value

# Random trials before the sampler models what it has seen, and trials before any is compared with them.
RANDOM_TRIALS = 8
UNPRUNED_TRIALS = 4
# Share of the epochs that every trial gets: at the start of a schedule the order of trials says little.
UNPRUNED_EPOCHS = 0.3


@dataclass(frozen=True)
class Best:
    """The best trial: its settings by name, its validation score, its number and its run."""

    overrides: dict[str, Any]
    score: float
    trial: int
    run: Run

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides as `load_config` takes them, such as optimizer.lr=0.01."""
        return tuple(f"{name}={as_value(value)}" for name, value in self.overrides.items())


def sweep(
    config_content: Mapping[str, Any],
    space: Space,
    *,
    n_trials: int,
    folder: Path,
    seed: int = 0,
    prune: bool = True,
    progress: Progress | None = None,
    source: str = "the configuration",
) -> Best:
    """Try `n_trials` settings of `space` and give the best; goes on with what is in `folder`.

    Args:
        config_content: the sections of a configuration, as `read_config` gives them.
        space: setting -> range, see `hashseek.training.runs.sweep_space`.
        n_trials: of the whole sweep, with those that are done already.
        folder: where everything is kept.
        seed: of the trials' settings; the seed of training is in the configuration.
        prune: end a trial whose best validation mAP so far is below the median of those before it at the same epoch.
            Runs in several processes are not pruned.
        progress: where to show the way.
        source: what messages call the configuration.

    Raises:
        BadConfig: bad ranges or settings, a folder that holds something else, or no trial that came to a score.
        HashseekError: what stops a training run, except a loss that is no number and too little memory: such a trial
            counts as the worst.
    """
    progress = progress or Progress(quiet=True)
    content = {key: copy.deepcopy(value) for key, value in config_content.items() if key != "sweep"}
    config = parse_config(content, source=source)
    distributions = parse_space(space)
    check_space(content, distributions, source=source)
    if n_trials < 1:
        raise BadConfig(f"a sweep needs at least one trial, not {n_trials}")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _describe(folder, {"config": content, "space": dict(space), "seed": seed, "prune": prune})
        study = _open(folder, config, prune=prune)
        while (trial := _next(study, n_trials, seed=seed)) is not None:
            values = {name: _suggest(trial, name, one) for name, one in distributions.items()}
            _try(study, trial, with_values(content, values), values, folder, prune=prune, progress=progress)
            _drop_weights(study, folder)
        best = _best(study, folder)
        _write_results(study, distributions, content, best, folder, score_name=f"validation mAP@{config.train.val_n}")
    progress.console.print(table(study, distributions))
    return best


def table(study: optuna.Study, space: Distributions, *, n: int = 20) -> Table:
    """The `n` best trials, for a terminal."""
    shown = Table(title=f"{len(study.get_trials(deepcopy=False))} trials, best first")
    for heading in ("trial", "validation mAP", "epochs", "seconds", *space):
        shown.add_column(heading.replace(" ", "\n").replace(".", ".\n"), justify="right", no_wrap=True)
    for trial in sorted(study.get_trials(deepcopy=False), key=lambda trial: (-_score(trial), trial.number))[:n]:
        score = f"{trial.value:.4f}" if trial.state == TrialState.COMPLETE else _outcome(trial)
        attributes = trial.user_attrs
        shown.add_row(
            str(trial.number),
            score,
            str(len(trial.intermediate_values)),
            f"{attributes.get('seconds', 0):.1f}",
            *(_text(trial.params.get(name)) for name in space),
        )
    return shown


def _describe(folder: Path, what: dict[str, Any]) -> None:
    file = folder / "sweep.json"
    if file.is_file():
        changes = differences(json.loads(file.read_text(encoding="utf-8")), json.loads(json.dumps(what)))
        if changes:
            raise BadConfig(
                f"the sweep in {folder} was begun with other settings ({'; '.join(changes)}): go on with the same "
                "ones, or choose another folder with --out"
            )
        return
    if any(path.name != ".lock" for path in folder.iterdir()):
        raise BadConfig(f"{folder} holds something else than a sweep: choose another folder with --out")
    write_atomically(file, json.dumps(what, indent=2).encode())


def _open(folder: Path, config: Config, *, prune: bool) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = folder / "sweep.db"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(file, timeout=60, check_same_thread=False)
        # Not synced at every epoch: after a power loss the file is still sound, and the logs have what it lacks.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    warmup = math.ceil(UNPRUNED_EPOCHS * config.train.epochs)
    median = optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED_TRIALS, n_warmup_steps=warmup)
    return optuna.create_study(
        study_name="sweep",
        storage=optuna.storages.RDBStorage(f"sqlite:///{file}", engine_kwargs={"creator": connect}),
        direction="maximize",
        pruner=median if prune else optuna.pruners.NopPruner(),
        load_if_exists=True,
    )


def _next(study: optuna.Study, n_trials: int, *, seed: int) -> optuna.Trial | None:
    """The trial that was not finished, else a new one, else None."""
    trials = study.get_trials(deepcopy=False)
    broken_off = [trial for trial in trials if trial.state == TrialState.RUNNING]
    number = broken_off[0].number if broken_off else len(trials)
    if not broken_off and number >= n_trials:
        return None
    study.sampler = optuna.samplers.TPESampler(seed=seed * 1_000_003 + number, n_startup_trials=RANDOM_TRIALS)
    return optuna.Trial(study, broken_off[0]._trial_id) if broken_off else study.ask()


def _suggest(trial: optuna.Trial, name: str, one: object) -> Any:
    """A value; for a trial that was broken off, the one it had."""
    match one:
        case FloatDistribution(low=low, high=high, log=log, step=step):
            return trial.suggest_float(name, low, high, log=log, step=step)
        case IntDistribution(low=low, high=high, log=log, step=step):
            return trial.suggest_int(name, low, high, log=log, step=step)
        case CategoricalDistribution(choices=choices):
            return trial.suggest_categorical(name, choices)
    raise TypeError(f"no range: {one}")


def _try(
    study: optuna.Study,
    trial: optuna.Trial,
    content: dict[str, Any],
    values: dict[str, Any],
    folder: Path,
    *,
    prune: bool,
    progress: Progress,
) -> None:
    """Run a trial to its end and tell the study."""
    shown = ", ".join(f"{name} = {_text(value)}" for name, value in values.items())
    run = _run_of(folder, trial.number)
    started = time.perf_counter()
    pruned = False
    try:
        config = parse_config(content, source=f"trial {trial.number} ({shown})")
        score_name = f"val_mAP@{config.train.val_n}"
        reported = set(study.get_trials(deepcopy=False)[trial.number].intermediate_values)

        def report(record: dict[str, Any]) -> None:
            if record["epoch"] not in reported:
                trial.report(record[score_name], record["epoch"])

        def watch(record: dict[str, Any]) -> None:
            nonlocal pruned
            report(record)
            pruned = prune and trial.should_prune()
            if pruned:
                raise Stop

        earlier = read_log(run)
        for record in earlier:
            report(record)
        spent = sum(record["seconds"] for record in earlier)
        pruned = bool(earlier) and prune and trial.should_prune()
        if not pruned:
            several = config.train.devices > 1
            result = fit(config, out=run.folder, resume=run.config.is_file(), on_epoch=None if several else watch)
            if several:
                for record in read_log(run):
                    report(record)
    except (Diverged, OutOfMemory) as error:
        trial.set_user_attr("reason", str(error))
        study.tell(trial, state=TrialState.PRUNED)
        progress.console.print(f"trial {trial.number}  {shown}  ended: {error}", markup=False)
        return
    except HashseekError as error:
        raise type(error)(f"trial {trial.number} of the sweep ({shown}): {error}") from None
    trial.set_user_attr("seconds", spent + time.perf_counter() - started)
    if pruned:
        study.tell(trial, state=TrialState.PRUNED)
        outcome = f"pruned after {len(read_log(run))} epochs"
    else:
        study.tell(trial, result.best_score)
        outcome = f"validation mAP {result.best_score:.4f}"
    progress.console.print(f"trial {trial.number}  {shown}  {outcome}", markup=False)


def _drop_weights(study: optuna.Study, folder: Path) -> None:
    """Leave only the best trial its weights: a hundred of a ResNet-50 would fill a disk."""
    finished = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
    best = max(finished, key=lambda trial: (_score(trial), -trial.number))
    for trial in finished:
        run = _run_of(folder, trial.number)
        for file in (run.state, run.last) if trial is best else (run.state, run.last, run.best):
            file.unlink(missing_ok=True)


def _best(study: optuna.Study, folder: Path) -> Best:
    trials = study.get_trials(deepcopy=False)
    scored = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if not scored:
        reason = trials[0].user_attrs.get("reason", "it was pruned")
        raise BadConfig(f"none of the {len(trials)} trials came to a score: change the ranges; of the first, {reason}")
    best = max(scored, key=lambda trial: (_score(trial), -trial.number))
    return Best(dict(best.params), _score(best), best.number, _run_of(folder, best.number))


def _write_results(
    study: optuna.Study, space: Distributions, content: dict[str, Any], best: Best, folder: Path, *, score_name: str
) -> None:
    trials = study.get_trials(deepcopy=False)
    found = f"{score_name} {best.score:.4f} in trial {best.trial}"
    header = (
        f"Best of {len(trials)} trials over {', '.join(space)}: {found}.\n\n"
        f"command:   hashseek train {folder / 'best.toml'}"
    )
    write_atomically(folder / "best.toml", as_toml(with_values(content, best.overrides), header=header).encode())
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    writer.writerow(["trial", "outcome", score_name.replace(" ", "_"), "epochs", "seconds", *space, "reason"])
    for trial in trials:
        attributes, epochs = trial.user_attrs, len(trial.intermediate_values)
        value = trial.value if trial.state == TrialState.COMPLETE else None
        seconds = f"{attributes.get('seconds', 0):.1f}"
        parameters = [trial.params.get(name) for name in space]
        writer.writerow(
            [trial.number, _outcome(trial), value, epochs, seconds, *parameters, attributes.get("reason", "")]
        )
    write_atomically(folder / "trials.csv", rows.getvalue().encode())
    write_atomically(folder / "sweep.svg", draw(_panels(trials, space, best, score_name)).encode())


def _panels(trials: list[FrozenTrial], space: Distributions, best: Best, score_name: str) -> list[Panel]:
    scored = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    scores = [_score(trial) for trial in scored]
    numbers = [float(trial.number) for trial in scored]
    so_far = [max(scores[: i + 1]) for i in range(len(scores))]
    title = score_name[0].upper() + score_name[1:]
    series = [Series("trial", numbers, scores, dots=True), Series("best so far", numbers, so_far)]
    panels = [Panel(title, series, x_label="trial", whole_x=True)]
    for name, one in space.items():
        log = isinstance(one, (FloatDistribution, IntDistribution)) and one.log
        names = tuple(map(_text, one.choices)) if isinstance(one, CategoricalDistribution) else ()

        def place(value: Any, one: object = one) -> float:
            return float(one.choices.index(value)) if isinstance(one, CategoricalDistribution) else float(value)

        points = Series(name, [place(trial.params[name]) for trial in scored], scores, dots=True)
        mark = (place(best.overrides[name]), best.score, f"{best.score:.4f}: {_text(best.overrides[name])}")
        whole = isinstance(one, IntDistribution)
        panels.append(Panel(name, [points], x_label="", log_x=log, whole_x=whole, x_names=names, mark=mark))
    return panels


def _run_of(folder: Path, number: int) -> Run:
    return Run(folder / "trials" / f"{number:04}")


def _score(trial: FrozenTrial) -> float:
    return float(trial.value) if trial.state == TrialState.COMPLETE and trial.value is not None else -math.inf


def _outcome(trial: FrozenTrial) -> str:
    return "failed" if "reason" in trial.user_attrs else {TrialState.COMPLETE: "scored"}.get(trial.state, "pruned")


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("wb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadConfig(f"another process is working on the sweep in {folder}: wait for it") from None
        yield
