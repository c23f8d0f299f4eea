"""The sdist and the wheel: complete, one import name, and usable beside packages called `api` and `training`."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.xdist_group("packaging")  # one process builds for all tests
FOLDERS = ("api", "indexing", "retrieval", "training")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_with_code_is_listed():
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    names = {"hashseek." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(SETTINGS["tool"]["setuptools"]["packages"]) == names - {"hashseek.api.python"} | {"hashseek"}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", source)
    return source / "dist"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The folder that the wheel is installed into."""
    target = tmp_path_factory.mktemp("site-packages")
    [wheel] = built.glob("*.whl")
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", target)
    run(sys.executable, "-m", "pip", "install", *options, wheel)
    return target


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_tracked_file_of_the_packages_under_one_name(installed):
    files = {path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    wanted = {Path("hashseek") / path for path in files if "__pycache__" not in path.parts}
    wanted = {Path("hashseek", *path.parts[3:]) if path.parts[1:3] == ("api", "python") else path for path in wanted}
    found = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    found = {path for path in found if "__pycache__" not in path.parts}
    assert {path for path in found if path.parts[0] == "hashseek"} == wanted
    assert {path.parts[0] for path in found} == {
        "hashseek",
        f"hashseek-{SETTINGS['project']['version']}.dist-info",
        "bin",
    }


def test_the_sdist_holds_the_licence_and_no_tests(built):
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "pyproject.toml", *FOLDERS} <= top
    assert "tests" not in top


def test_it_works_in_a_folder_with_packages_called_api_and_training(installed, tmp_path):
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a package of the user')")
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def python(*arguments: str) -> str:
        return run(sys.executable, *arguments, cwd=tmp_path, env=environment)

    place = python("-c", "import hashseek; print(hashseek.__file__)")
    assert Path(place.strip()) == installed / "hashseek" / "__init__.py"
    assert "hyp2" in python("-m", "hashseek", "losses")


def test_citation_and_package_name_the_same_version_and_licence():
    citation = dict(
        line.split(": ", 1)
        for line in (ROOT / "CITATION.cff").read_text().splitlines()
        if line[0] not in " -" and ": " in line
    )
    assert (citation["version"], citation["license"]) == (
        SETTINGS["project"]["version"],
        SETTINGS["project"]["license"],
    )
