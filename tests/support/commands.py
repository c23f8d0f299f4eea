"""`hashseek` commands in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# A process that has loaded everything once and forks one child per command: as real as a process can be, and twenty
# times as quick to start. The parent of the command stays to note how it ended.
FORK_SERVER = """
import ctypes, gc, json, multiprocessing, os, signal, sys, traceback
import numpy, uvicorn, hashseek.indexing.cli.collection, hashseek.api.cli.serve, hashseek.api.app
# What commands import only when they need it:
import hashseek.indexing.cli.search
import hashseek.indexing.maintenance.recheck, hashseek.indexing.maintenance.refit
import hashseek.indexing.maintenance.repair, hashseek.retrieval.metrics, hashseek.retrieval.models.weight_loading
import hashseek.retrieval.encoder, torchvision.models, scipy.sparse.csgraph
import torch; torch.set_num_threads(1)
from hashseek.api.cli import main

def drop_rights():
    "Root may write anywhere by two capabilities; without them the mode of files and folders counts."
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for i in range(3):
        sets[i] &= ~0b110 & 0xFFFFFFFF
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())

def in_order(code):
    gc.unfreeze()
    sys.exit(code)

multiprocessing.set_start_method("fork")  # otherwise Python 3.14 reports leaked locks after os._exit
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if os.fork():
        continue
    task = json.loads(line)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        with open(task["folder"] + "/pid.new", "w") as file: file.write(str(child))
        os.rename(task["folder"] + "/pid.new", task["folder"] + "/pid")
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with open(task["folder"] + "/code.new", "w") as file: file.write(str(code))
        os.rename(task["folder"] + "/code.new", task["folder"] + "/code")
        os._exit(0)
    for number, name in enumerate(("/dev/null", "out", "err")):
        handle = os.open(os.path.join(task["folder"], name), os.O_RDWR | os.O_CREAT, 0o644)
        os.dup2(handle, number)
    sys.stdin = open(0); sys.stdout = open(1, "w"); sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")
    os.chdir(task["folder"])
    finish = os._exit  # taking every library down takes a second; `before` may ask for it by finish = in_order
    try:
        exec(task["before"])
        main(task["arguments"])
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    finish(code or 0)
"""


@dataclass
class Command:
    """A `hashseek` command in a process of its own."""

    folder: Path

    @property
    def pid(self) -> int:
        wait_until((self.folder / "pid").exists)
        return int((self.folder / "pid").read_text())

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text() if (self.folder / "out").exists() else ""

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text() if (self.folder / "err").exists() else ""

    @property
    def ended(self) -> bool:
        return (self.folder / "code").exists()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = 120) -> int:
        """Its exit code, or minus the signal that killed it."""
        wait_until(lambda: self.ended, seconds)
        return int((self.folder / "code").read_text())


@contextmanager
def command_starter() -> Iterator[Callable[..., Command]]:
    """A function that starts `hashseek` in a new folder, with arguments; `before` is code that runs in it first."""
    with subprocess.Popen([sys.executable, "-c", FORK_SERVER], stdin=subprocess.PIPE, text=True) as process:

        def start(folder: Path, *arguments: object, before: str = "") -> Command:
            task = {"folder": str(folder), "arguments": [str(a) for a in arguments], "before": before}
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            return Command(folder)

        yield start
        process.kill()


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait for a condition; generous, since other work may be going on."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
