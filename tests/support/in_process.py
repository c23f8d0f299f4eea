"""Runs the command line inside the test process, where a new process would take seconds to import torch."""

import pytest

from hashseek.api.cli import main


def run_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of `hashseek ARGUMENTS`."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err
