"""Without options and settings, commands encode with OpenVINO on a processor."""

import json

import pytest

from support.commands import Command


@pytest.fixture
def by_default(own_cache):
    """Code that runs before a command: the tests' own engine is not set."""
    return f"import os; os.environ.pop('HASHSEEK_ENGINE'); os.environ['HASHSEEK_CACHE'] = {str(own_cache)!r}"


def test_commands_side_by_side_share_the_cache_and_give_one_code(
    by_default, own_cache, start, hashseek, checkpoint, pictures, tmp_path
):
    folders = [tmp_path / "one", tmp_path / "two"]
    commands: list[Command] = [
        start("index", "add", folder, pictures, "--checkpoint", checkpoint, "--device", "cpu", before=by_default)
        for folder in folders
    ]
    assert [command.wait() for command in commands] == [0, 0]
    assert [command.err for command in commands] == ["", ""]
    assert len([path for path in own_cache.rglob("*") if path.is_file()]) == 1
    for folder in folders:
        _, out, _ = hashseek("index", "stats", folder, "--json")
        [(engine, n)] = json.loads(out)["engines"].items()
        assert (engine.startswith("openvino cpu "), n) == (True, 12)
    # A picture alone has the code that it was given in a batch, by a network that is not converted again.
    convert_no_more = f"{by_default}; import torch; torch.export.export = None"
    for picture in sorted(pictures.glob("*.*"))[:2]:
        code, out, err = hashseek("search", folders[1], picture, "--device", "cpu", "--json", before=convert_no_more)
        assert (code, err) == (0, "")
        assert json.loads(out)["hits"][0]["distance"] == 0
