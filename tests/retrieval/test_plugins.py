"""Tests of hashseek.retrieval.plugins."""

import sys
from pathlib import Path

import pytest

from hashseek.retrieval.errors import BadConfig
from hashseek.retrieval.plugins import load_named


def test_a_name_loads_from_an_installed_package_and_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    (tmp_path / "my_plugin_module.py").write_text("class MyLoss:\n    pass\n")
    assert load_named("pathlib:Path", kind="data set") is Path
    assert load_named("my_plugin_module:MyLoss", kind="loss").__name__ == "MyLoss"


@pytest.mark.parametrize(
    "name",
    [
        "pathlib",
        "pathlib:",
        ":Path",
        "path lib:Path",
        "pathlib:Pa th",
        "pathlib:NoSuch",
        "no_such_module:Path",
        "math:pi",
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str) -> None:
    with pytest.raises(BadConfig):
        load_named(name, kind="backbone")


def test_an_error_inside_the_module_is_refused_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_plugin_module.py").write_text("1 / 0\n")
    with pytest.raises(BadConfig, match="ZeroDivisionError"):
        load_named("broken_plugin_module:Anything", kind="loss")
