"""Load a class or function from outside the package by its name, "module:Name".

A config or the command line may use such a name wherever it names a loss, a data set or a backbone; a checkpoint, only
one that is trusted.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from hashseek.retrieval.errors import BadCheckpoint, BadConfig

built: set[str] = set()
"""Backbones from outside that this process has built."""


def load_named(name: str, *, kind: str) -> Any:
    """Import `module` and return its attribute `Name`, for a name of the form "module:Name".

    The current directory is searched after the installed packages, so a file there is enough.

    Args:
        name: e.g. "my_losses:MyLoss" or "my_package.losses:MyLoss".
        kind: what the name stands for, used in messages: "loss", "data set" or "backbone".

    Raises:
        BadConfig: the name is malformed, the module cannot be imported, or it has no such function or class.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise BadConfig(f'{name!r} does not name a {kind}: write it as "module:Name"')
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        raise BadConfig(
            f"cannot import the module of the {kind} {name!r} ({type(error).__name__}: {error}): correct it, install "
            "it, or run the command in its folder"
        ) from error
    if not hasattr(module, attribute):
        raise BadConfig(f"the module {module_name!r} of the {kind} {name!r} has no attribute {attribute!r}")
    found = getattr(module, attribute)
    if not callable(found):
        raise BadConfig(f"the {kind} {name!r} is of type {type(found).__name__}: name a function or a class")
    return found


def check_trusted(name: str, *, kind: str, source: Path, or_else: str = "") -> None:
    """Check that a checkpoint may name "module:Name" as its backbone or data set: using it runs that function.

    It may if this process has built such a backbone already, as training does, or if the environment variable
    HASHSEEK_PLUGINS (module names, separated by commas) has its module.

    Args:
        name: "module:Name".
        kind: see `load_named`.
        source: the file of the checkpoint.
        or_else: what else one can do, for the message.

    Raises:
        BadCheckpoint: it may not.
    """
    module = name.partition(":")[0]
    trusted = [word.strip() for word in os.environ.get("HASHSEEK_PLUGINS", "").split(",") if word.strip()]
    if name not in built and module not in trusted:
        raise BadCheckpoint(
            f"{source} names the {kind} {name!r}, which is code outside Hashseek: if you trust it, set "
            f"HASHSEEK_PLUGINS={','.join([*trusted, module])}{or_else}"
        )
