"""Processes that a real torchrun starts train as one process does, on one host or two, also after one was killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from hashseek.retrieval.errors import BadConfig
from hashseek.training.config import Config
from hashseek.training.loop.fit import fit
from hashseek.training.runs.run_folder import Run, read_records
from support.commands import wait_until
from support.models import EVERYTHING, run_config

pytestmark = pytest.mark.usefixtures("own_cache")
EPOCHS = 6


def config(few_pictures: Path, **sections) -> Config:
    model = {"head": "linear_bn", "size": 32, "dropout": 0.5}
    return run_config(few_pictures, train__epochs=EPOCHS, **{"model": model, **sections})


def curve(run: Run, part: str = "loss") -> np.ndarray:
    rows = [[value for key, value in row.items() if part in key] for row in read_records(run.log)]
    assert len(rows) == EPOCHS
    return np.array(rows)


def assert_same_curve(run: Run, one: Run) -> None:
    np.testing.assert_allclose(curve(run), curve(one), rtol=2e-3)


def torchrun(settings: Config, out: Path, options: Sequence[str], before: Sequence[str] = (), **environment: str):
    """Start torchrun; its output goes into a file beside `out`."""
    file = out.with_suffix(".toml")
    file.write_text(tomli_w.dumps(settings.model_dump(mode="json", exclude_defaults=True)))
    command = [*before, sys.executable, "-m", "torch.distributed.run", *options, "-m", "hashseek", "train"]
    log = out.with_suffix(f".{time.monotonic_ns()}.log").open("wb")
    with log:
        return subprocess.Popen(
            [*command, str(file), "--out", str(out)],
            stdout=log,
            stderr=log,
            env=os.environ | environment,
            start_new_session=True,
        )


def kill_rank_1(out: Path, torchrun: subprocess.Popen[bytes]) -> None:
    """After the first epoch."""
    wait_until(lambda: Run(out).log.is_file() or torchrun.poll() is not None)
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            ours = f"{out}\0".encode() in (process / "cmdline").read_bytes()
            if ours and b"\0RANK=1\0" in b"\0" + (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
                return
    raise AssertionError("rank 1 does not run")


def finish(*started: subprocess.Popen, out: Path) -> str:
    try:
        codes = [process.wait(200) for process in started]
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    printed = "".join(log.read_text() for log in sorted(out.parent.glob(f"{out.name}.*.log")))
    assert codes == [0] * len(started), printed
    return printed


def test_a_killed_process_is_started_again_and_the_curve_is_that_of_an_undisturbed_run(few_pictures, tmp_path):
    """With a head that is fitted first; the other tests have one with batch norm."""
    model = {"head": "linear", "head_init": "itq", "size": 32, "dropout": 0.5}
    settings = EVERYTHING | {"partner": {"name": "asl", "on": "outputs"}, "model": model}
    out = tmp_path / "torchrun"
    process = torchrun(config(few_pictures, **settings), out, ["--nproc-per-node", "2", "--max-restarts", "2"])
    kill_rank_1(out, process)
    printed = finish(process, out=out)
    assert printed.splitlines().count(str(Run(out).best)) == 1  # only the first process prints
    assert "exitcode: -9" in printed
    for start in json.loads(Run(out).environment.read_text()):
        assert start["command"].split()[:2] == ["hashseek", "train"]
    undisturbed = fit(config(few_pictures, train__devices=2, **settings), out=tmp_path / "two").run
    assert np.array_equal(curve(Run(out)), curve(undisturbed))
    one = fit(config(few_pictures, **settings), out=tmp_path / "one").run
    # Differences of rounding grow with every epoch, and flip bits of the few validation images.
    np.testing.assert_allclose(curve(undisturbed)[:2], curve(one)[:2], rtol=2e-3)
    np.testing.assert_allclose(curve(undisturbed, "val")[:2], curve(one, "val")[:2], atol=0.02)


@contextmanager
def hosts() -> Iterator[list[str]]:
    """The names of two network namespaces with the addresses 10.213.77.1 and .2, as two hosts on one network."""
    if shutil.which("ip") is None:
        pytest.skip("the command `ip` is not installed")
    names = [f"hashseek{os.getpid()}{letter}" for letter in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
            for number, name in enumerate(names, start=1):
                ip("-n", name, "addr", "add", f"10.213.77.{number}/24", "dev", "wire")
                ip("-n", name, "link", "set", "wire", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be created here: {error.stderr!r}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_two_hosts_train_as_one_process_also_after_one_was_killed(few_pictures, tmp_path):
    settings, out = config(few_pictures, loss={"name": "tie_aware"}), tmp_path / "hosts"
    with hosts() as names:
        started = []
        for number, name in enumerate(names, start=1):
            options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-backend", "c10d"]
            options += ["--rdzv-endpoint", "10.213.77.1:29400", "--rdzv-conf", f"is_host={int(number == 1)}"]
            options += ["--local-addr", f"10.213.77.{number}"]
            before = ["ip", "netns", "exec", name]
            started.append(torchrun(settings, out, options, before, GLOO_SOCKET_IFNAME="wire"))
        kill_rank_1(out, started[1])
        printed = finish(*started, out=out)
    assert "exitcode: -9" in printed
    assert_same_curve(Run(out), fit(settings, out=tmp_path / "one").run)


def test_a_run_goes_on_with_another_number_of_processes(few_pictures, tmp_path):
    def stop(record) -> None:
        raise KeyboardInterrupt

    settings = config(few_pictures)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fit(settings, out=out, on_epoch=stop)
    two = fit(config(few_pictures, train__devices=2), out=out, resume=True).run
    assert_same_curve(two, fit(settings, out=tmp_path / "one").run)


def test_what_torchrun_started_is_not_started_again(few_pictures, tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(BadConfig, match="train.devices is 1.*2 processes"):
        fit(config(few_pictures), out=tmp_path / "run")
