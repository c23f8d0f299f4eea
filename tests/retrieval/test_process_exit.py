import subprocess
import sys

import pytest

_PROGRAM = """
import atexit, gc, sys, types
from hashseek.retrieval.process_exit import skip_gc_at_exit
before = gc.get_freeze_count()  # Python 3.12 itself freezes some objects
atexit.register(lambda: print(gc.get_freeze_count() > before))  # runs last
skip_gc_at_exit()
if sys.argv[1]: sys.modules[sys.argv[1]] = types.ModuleType(sys.argv[1])
"""


@pytest.mark.parametrize(("module", "frozen"), [("", True), ("triton", False)])
def test_nothing_is_collected_at_exit_unless_triton_would_report_it(module, frozen):
    done = subprocess.run([sys.executable, "-c", _PROGRAM, module], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{frozen}\n", "")
