"""Hyperparameters: their limits, their meaning, and the check of their values.

A loss declares each hyperparameter once, as an annotated class attribute with its default:

    class MyLoss(Loss):
        tau: Annotated[float, Number("temperature", above=0)] = 0.1
        positives: Annotated[str, Choice("which rows count as positives", ("any", "all"))] = "any"

A third part of the annotation is the keyword, if it differs from the attribute's name. `Loss` checks the given values,
and `hashseek losses` prints the same declarations.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from hashseek.retrieval.errors import BadConfig, suggest


@dataclass(frozen=True)
class Number:
    """A finite number within limits."""

    meaning: str
    least: float = -math.inf
    """The smallest value allowed."""
    most: float = math.inf
    """The largest value allowed."""
    above: float | None = None
    """A lower limit that is itself not allowed; use it in place of `least`."""
    whole: bool = False
    """Whether it must be an int."""
    derived: Callable[[Any], float] | None = None
    """For a hyperparameter without a fixed default: computes the value from the loss, for example from K."""

    def allows(self, value: object) -> bool:
        """Whether `value` lies within the limits; True and False are not numbers."""
        return (
            _is_finite(value)
            and (isinstance(value, int | np.integer) or not self.whole)
            and self.least <= value <= self.most
            and (self.above is None or value > self.above)
        )

    def __str__(self) -> str:
        kind = "a whole number " if self.whole else ""
        if self.most < math.inf and self.above is None and self.least == -math.inf:
            return f"{kind}<= {self.most:g}"
        if self.most < math.inf:
            return f"{kind}in {f'[{self.least:g}' if self.above is None else f'({self.above:g}'}, {self.most:g}]"
        if self.above is not None:
            return f"{kind}> {self.above:g}"
        return f"{kind}>= {self.least:g}" if self.least > -math.inf else "any finite number"


@dataclass(frozen=True)
class Choice:
    """One of several words."""

    meaning: str
    values: Collection[str]

    def allows(self, value: object) -> bool:
        """Whether `value` is one of the words."""
        return isinstance(value, str) and value in self.values

    def __str__(self) -> str:
        return f"one of {', '.join(self.values)}"


@dataclass(frozen=True)
class Flag:
    """True or false."""

    meaning: str

    def allows(self, value: object) -> bool:
        """Whether `value` is True or False, and not 1 or 0."""
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


Limits = Number | Choice | Flag


@dataclass(frozen=True)
class Hyperparameter:
    """One hyperparameter of a loss class."""

    name: str
    """The keyword by which it is set."""
    attribute: str
    """The attribute of the loss that holds it."""
    default: Any
    """None if the value is optional, or derived from K."""
    limits: Limits

    def is_unset_by(self, value: object) -> bool:
        """Whether `value` is "none", which a configuration writes for None, and None is the default."""
        return isinstance(value, str) and value == "none" and self.default is None

    def check(self, value: object) -> None:
        """Raise `BadConfig` unless `value` is allowed; None is allowed if it is the default."""
        if value is not None or self.default is not None:
            check(self.name, value, self.limits)


def check(name: str, value: object, limits: Limits) -> None:
    """Raise `BadConfig` unless `limits` allow the value called `name`."""
    if not limits.allows(value):
        raise BadConfig(f"{name} must be {limits}, got {value!r}")


def check_keys(what: str, given: Mapping[str, Any], allowed: Collection[str], needed: Collection[str] = ()) -> None:
    """Raise `BadConfig` unless `given` is a mapping with all the `needed` keys and only `allowed` ones."""
    if not isinstance(given, Mapping):
        raise BadConfig(f"{what} must be a table with the keys {', '.join(allowed)}, not {given!r}")
    for key in given:
        if key not in allowed:
            raise BadConfig(f"{what} has no hyperparameter {key!r}: {suggest(key, allowed)}")
    for key in needed:
        if key not in given:
            raise BadConfig(f"{what} has no {key!r}: set {' and '.join(needed)}")


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)
