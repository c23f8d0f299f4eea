"""The wheel holds every package, under one import name."""

import tomllib

from support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_folder_with_code_is_in_the_wheel():
    folders = {
        path.parent for top in ("api", "indexing", "retrieval", "training") for path in (ROOT / top).rglob("*.py")
    }
    names = {"hashseek." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(PROJECT["packages"]) == names - {"hashseek.api.python"} | {"hashseek"}
