"""The search space of a sweep: setting -> range, as written under [sweep.space] in a configuration.

[sweep.space]
"optimizer.lr" = {low = 1e-4, high = 1e-1, log = true}      # a number
"train.rand_augment" = {low = 0, high = 4, step = 2}        # a whole number
"loss.beta" = [0.5, 0.75, 1.0]                              # one of these
"""

import math
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from hashseek.retrieval.errors import BadConfig, suggest
from hashseek.training.config import Config, parse_config, with_values
from hashseek.training.loop.network import check_losses, is_unsupervised
from hashseek.training.losses import loss_class
from hashseek.training.losses.hyperparameters import check

Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
Distributions = dict[str, Distribution]

# These change how trials are scored, so that scores would not be comparable: the validation split is drawn by the seed.
MEASURES = ("train.val_fraction", "train.val_n", "train.val_database", "train.seed")
SECTIONS = ("model", "loss", "partner", "projection", "memory", "optimizer", "train")


def parse_space(space: Mapping[str, Any]) -> Distributions:
    """Optuna's distributions of the ranges, by setting.

    Raises:
        BadConfig: no range, or one that is misspelt or empty.
    """
    found = {key: _distribution(key, value) for key, value in _flat(space)}
    if not found:
        raise BadConfig(
            "the sweep has nothing to search: add settings under [sweep.space], such as "
            '"optimizer.lr" = {low = 1e-4, high = 1e-1, log = true}'
        )
    return found


def check_space(content: Mapping[str, Any], space: Distributions, *, source: str) -> None:
    """Check that both ends of every range, and every choice, are valid in the configuration, alone and in pairs.

    Raises:
        BadConfig: a setting or loss that does not exist, a loss without a validation score, a value outside its limits,
            two settings that contradict each other, or one that decides how trials are scored.
    """
    for key in space:
        section = key.partition(".")[0]
        if section not in SECTIONS or "." not in key:
            raise BadConfig(f"the sweep has no setting {key!r}: write section.key with one of {', '.join(SECTIONS)}")
        if key in MEASURES:
            raise BadConfig(f"the sweep's setting {key!r} changes how trials are scored: leave it out")
    for keys in (*((key,) for key in space), *combinations(space, 2)):
        for values in product(*(_ends(space[key]) for key in keys)):
            chosen = with_values(content, zip(keys, values, strict=True))
            config = parse_config(chosen, source=f"{source}, sweep of {' and '.join(keys)}")
            if is_unsupervised(config):
                raise BadConfig(
                    f"a sweep compares validation scores, but the loss {config.loss.name!r} uses no labels and has "
                    "none: train it with `hashseek train`"
                )
            for key in keys:
                if key.partition(".")[0] in ("loss", "partner"):
                    _check_hyperparameter(key, config, space)
            check_losses(config)


def _flat(space: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names, also where TOML reads the dots as tables."""
    for key, value in space.items():
        if isinstance(value, Mapping) and value and not {"low", "high"} & set(value):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _distribution(key: str, value: Any) -> Distribution:
    try:
        if isinstance(value, list):
            if len(value) < 2 or not all(isinstance(choice, bool | int | float | str) for choice in value):
                raise ValueError("a list needs at least two numbers, words or booleans")
            return CategoricalDistribution(value)
        if not (isinstance(value, Mapping) and {"low", "high"} <= value.keys()):
            raise ValueError("it has no low and high")
        numbers = [value[name] for name in ("low", "high", "step") if name in value]
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError("the ends of a range must be finite")
        return (IntDistribution if all(isinstance(number, int) for number in numbers) else FloatDistribution)(**value)
    except (TypeError, ValueError) as error:  # from Optuna too
        reason = str(error).rstrip(".")
        raise BadConfig(
            f"the range of {key!r} is {value!r}, but {reason}; write a list of choices, or {{low = ..., high = ...}} "
            "with log = true or step = ... where needed"
        ) from None


def _ends(distribution: Distribution) -> tuple[Any, ...]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    return distribution.low, distribution.high


def _check_hyperparameter(key: str, config: Config, space: Distributions) -> None:
    """Check a hyperparameter, which the schema of the configuration does not list, against its loss."""
    section, name = key.split(".")[:2]
    named = getattr(config, section)
    if name in type(named).model_fields:
        return
    names = space.get(f"{section}.name")
    for loss in names.choices if isinstance(names, CategoricalDistribution) else (named.name,):
        found = loss_class(str(loss)).hyperparameters()
        known = [*found, "quantization", "nested"]
        if name not in known:
            hint = suggest(name, known)
            raise BadConfig(f"the sweep's setting {key!r}: the loss {loss!r} has no hyperparameter {name!r}: {hint}")
        if name in found and not found[name].is_unset_by(named.options()[name]):
            check(f"the sweep's setting {key!r}", named.options()[name], found[name].limits)
