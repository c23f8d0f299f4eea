"""The data sets by name. Each is a function with keyword options that returns `Splits(train, query, database)`.

To add one here, write such a function in a module of this folder and add a line to `DATASETS`. A data set outside the
package is named "module:function" instead.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError, validate_call

from hashseek.retrieval.errors import BadConfig, suggest
from hashseek.retrieval.plugins import load_named
from hashseek.training.data.splits import Split, Splits

__all__ = ["DATASETS", "Split", "Splits", "build_splits", "data_set"]

DATASETS = {  # name, which is also the function's -> its module here
    "shapes": "shapes",
    "folder": "folder",
    "pictures": "folder",
    "lists": "lists",
    "shards": "shards",
    "voc2007": "voc",
    "voc2012": "voc",
    "mirflickr": "mirflickr",
    "nuswide": "nuswide",
    "coco": "coco",
    "cifar10": "cifar",
    "scene": "vectors",
    "yeast": "vectors",
    "emotions": "vectors",
    "cal500": "vectors",
    "vectors": "vectors",
}


_VOC = "Everingham et al., The Pascal Visual Object Classes (VOC) Challenge, IJCV 2010"
SOURCES = {  # authors, title, where and when, for the citation text of a report
    "voc2007": _VOC,
    "voc2012": _VOC,
    "mirflickr": "Huiskes and Lew, The MIR Flickr Retrieval Evaluation, ACM MIR 2008",
    "nuswide": "Chua et al., NUS-WIDE: A Real-World Web Image Database from NUS, CIVR 2009",
    "coco": "Lin et al., Microsoft COCO: Common Objects in Context, ECCV 2014",
    "cifar10": "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, University of Toronto 2009",
    "scene": "Boutell et al., Learning Multi-Label Scene Classification, Pattern Recognition 2004",
    "yeast": "Elisseeff and Weston, A Kernel Method for Multi-Labelled Classification, NIPS 2001",
    "emotions": "Trohidis et al., Multi-Label Classification of Music into Emotions, ISMIR 2008",
    "cal500": "Turnbull et al., Semantic Annotation and Retrieval of Music and Sound Effects, IEEE TASLP 2008",
}


def data_set(name: str) -> Callable[..., Splits]:
    """The function of the data set `name`, which may also be "module:function".

    Raises:
        BadConfig: there is no such data set.
    """
    if ":" in name:
        function = load_named(name, kind="data set")
    elif name in DATASETS:
        function = getattr(importlib.import_module(f"{__name__}.{DATASETS[name]}"), name)
    else:
        raise BadConfig(f'there is no data set {name!r}: choose one of {", ".join(DATASETS)}, or "module:function"')
    return function  # type: ignore[no-any-return]


def _given(name: str, function: Callable[..., Splits], options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that "none" unsets. Raises `BadConfig` for an unknown or a missing option."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    for option in options:
        if option not in parameters:
            raise BadConfig(f"the data set {name!r} has no option {option!r}: {suggest(option, parameters)}")
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in options:
            raise BadConfig(
                f"the data set {name!r} needs the option {option!r}: pass it as {option}=VALUE, or data.{option} in a "
                "TOML file"
            )
    unset = {option for option, value in options.items() if value == "none" and parameters[option].default is None}
    return {option: value for option, value in options.items() if option not in unset}


def build_splits(name: str, **options: Any) -> Splits:
    """The splits of data set `name`, which may also be "module:function".

    Raises:
        BadConfig: unknown data set, unknown or missing option, or a value of the wrong type.
        BadDataset: the data are missing or inconsistent.
    """
    function = data_set(name)
    options = _given(name, function, options)
    if name not in DATASETS:  # a function from elsewhere, whose annotations may not describe its options
        splits = function(**options)
        if not isinstance(splits, Splits):
            raise BadConfig(
                f"the data set {name!r} returned {type(splits).__name__}, not Splits: see docs/how-to/extend.md"
            )
        return splits
    try:
        return validate_call(function)(**options)
    except ValidationError as error:
        first = error.errors()[0]
        option, reason = first["loc"][0], first["msg"]
        raise BadConfig(
            f"the option {option!r} of the data set {name!r} is {first['input']!r}: {reason[0].lower()}{reason[1:]}"
        ) from None
