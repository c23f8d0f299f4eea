"""A Milvus server for tests: the one that HASHSEEK_MILVUS_URI names, or one that `make .venv-milvus/installed` made."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

COMMAND = Path(__file__).parents[2] / ".venv-milvus" / "bin" / "milvus-server"
_MEMORY = 3 * 2**30  # that must be available


def missing() -> str | None:
    """Why no server can be started here; None if one can."""
    if not COMMAND.is_file():
        return f"there is no {COMMAND}: run `make .venv-milvus/installed`, or set HASHSEEK_MILVUS_URI"
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    available = 1024 * int(found[1]) if found else 0
    return None if available > _MEMORY else f"a Milvus server needs {_MEMORY / 2**30:.0f} GB, {available:,} B are free"


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class MilvusServer:
    """A server with its data in `folder`, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.uri = f"milvus://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait until it listens.

        Raises:
            RuntimeError: it does not. Some of its ports cannot be chosen, so there can be only one on a machine.
        """
        command = [str(COMMAND), "--data", str(self.folder), "--proxy-port", str(self.port)]
        environment = dict(os.environ)
        if (binary := self.folder / "bin" / "milvus").is_file():
            # Connections that were open when the server was killed keep its port for a minute, and the command would
            # take the next one. The server itself can listen on it.
            command = [str(binary), "run", "standalone"]
            environment |= {
                "DEPLOY_MODE": "STANDALONE",
                "METRICS_PORT": str(free_port()),
                "MILVUS_RUN_DIR": str(self.folder / "run"),
                "LD_LIBRARY_PATH": str(binary.parent),
            }
        with (self.folder / "output").open("ab") as output:
            # A session of its own: the command starts the server as a child.
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, cwd=self.folder, env=environment
            )
        until = time.monotonic() + 60
        while time.monotonic() < until and self._process.poll() is None:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        self.kill()
        raise RuntimeError(f"the Milvus server did not start: {(self.folder / 'output').read_text()[-2000:]}")

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def running(folder: Path) -> Iterator[MilvusServer]:
    """A server that is ended and deleted afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    server = MilvusServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
