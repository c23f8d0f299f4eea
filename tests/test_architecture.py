"""What each package imports at run time, how quickly commands answer, and that documents name what exists."""

import re
import subprocess
import sys

import pytest

from hashseek.api.cli import COMMANDS
from support.paths import ROOT


def loaded_by(program: str, *names: str) -> set[str]:
    """Which of the modules `names` a fresh interpreter has loaded after running `program`."""
    check = f"\nimport sys\nprint([name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program + check], capture_output=True, text=True, check=True)
    return set(re.findall(r"'([\w.]+)'", done.stdout.splitlines()[-1]))


def test_retrieval_and_training_import_where_neither_faiss_nor_fastapi_is_installed():
    program = (
        "import sys\n"
        "for name in ('faiss', 'fastapi', 'uvicorn', 'starlette'): sys.modules[name] = None\n"
        "import importlib, pkgutil, hashseek.retrieval, hashseek.training\n"
        "for package in (hashseek.retrieval, hashseek.training):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if module.name != 'hashseek.training.evaluation.evaluate': importlib.import_module(module.name)\n"
    )
    assert loaded_by(program, "hashseek.training.loop.fit", "hashseek.retrieval.encoder", "hashseek.indexing") == {
        "hashseek.training.loop.fit",
        "hashseek.retrieval.encoder",
    }


def test_a_client_loads_neither_torch_nor_fastapi():
    names = ("torch", "faiss", "fastapi", "hashseek.indexing", "hashseek.api.messages.schemas")
    assert loaded_by("import hashseek; hashseek.Client", *names) == {"hashseek.api.messages.schemas"}


@pytest.mark.parametrize(
    ("arguments", "n_modules"),
    [
        (["--help"], 400),
        (["no-such-command"], 400),
        (["serve", "--help"], 750),
        (["serve", "no-such-folder"], 600),
        (["serve", "no-such-folder", "--port", "70000"], 600),
        (["demo", "--port", "x"], 400),
    ],
)
def test_help_and_refusals_import_little_and_nothing_heavy(arguments, n_modules):
    """They are as quick as their imports, which are easier to count than to time."""
    program = (
        "import sys, contextlib, io\nfrom hashseek.api.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main({arguments})\n"
        "heavy = {'torch', 'faiss', 'scipy', 'fastapi', 'hashseek.training'}\n"
        "print(len(sys.modules), *heavy & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported, *heavy = done.stdout.split()
    assert heavy == []
    assert int(imported) < n_modules


def test_serving_and_searching_load_neither_torch_nor_training_code():
    """Torch would take two seconds and 500 MB."""
    program = (
        "import hashseek.api.cli.serve, hashseek.api.app, hashseek.retrieval.metrics\n"
        "import hashseek.indexing.cli.collection, hashseek.indexing.cli.search"
    )
    assert loaded_by(program, "torch", "hashseek.training", "hashseek.api.app") == {"hashseek.api.app"}


def test_torch_and_faiss_compute_in_one_process():
    import faiss
    import numpy as np
    import torch

    weights = torch.randn(64, 64, requires_grad=True)
    for _ in range(3):
        (weights @ weights).sum().backward()
        flat = faiss.IndexBinaryFlat(64)
        flat.add(np.random.default_rng(0).integers(0, 256, (1000, 8), dtype=np.uint8))
        assert flat.search(np.zeros((4, 8), np.uint8), 5)[0].shape == (4, 5)


def test_the_top_level_is_the_one_that_was_agreed():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == {"retrieval", "training", "indexing", "api", "experiments"}


DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
DOCUMENTS += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a Markdown file, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


MAKEFILE = (ROOT / "Makefile").read_text()
[BENCHMARKS] = re.findall(r"^BENCHMARKS := \$\(addprefix bench-,(.*)\)$", MAKEFILE, re.M)
MAKE_TARGETS = {
    *re.findall(r"^\.PHONY:(.*)$", MAKEFILE, re.M)[0].split(),
    *(f"bench-{name}" for name in BENCHMARKS.split()),
}


@pytest.mark.parametrize("file", DOCUMENTS)
def test_documents_point_at_files_that_exist_and_commands_that_are_there(file):
    text = (ROOT / file).read_text()
    for target in re.findall(r"\]\(([^):]+)\)", text):
        path, _, anchor = target.partition("#")
        found = (ROOT / file).parent / path if path else ROOT / file
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text()), target
    if file != "CHANGELOG.md":  # which also names commands of earlier versions
        assert {*re.findall(r"(?:`|^ *)hashseek (\w+)", text, re.M)} <= {*COMMANDS}
    for target in re.findall(r"\bmake ([\w-]+)`", text):
        assert target in MAKE_TARGETS, target


def test_code_mentions_only_documents_that_exist():
    mentioned = {
        target
        for folder in ("api", "bench", "experiments", "indexing", "retrieval", "training")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".toml")
        for target in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert mentioned
    assert [target for target in mentioned if not (ROOT / target).exists()] == []
