"""Several processes train as one does with the same global batch, and say what goes wrong in any of them."""

import atexit
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hashseek.retrieval.errors import BadConfig, BadDataset, HashseekError
from hashseek.training.data.datasets.shapes import render_shapes
from hashseek.training.loop.fit import fit
from hashseek.training.loop.parallel import average_buffers, launch, n_batches, own_part, sum_gradients
from hashseek.training.loop.sync_batch_norm import share_batch_norm
from hashseek.training.losses.memory import gather_rows
from hashseek.training.runs.run_folder import Run, read_log
from support.models import run_config as config

pytestmark = pytest.mark.usefixtures("own_cache")

EVERYTHING = {
    "loss": {"name": "mulsupcon", "on": "projection", "tau": 0.2},
    "projection": {"width": 16, "hidden": 24},
    "memory": {"size": 40, "momentum": 0.9},
    "partner": {"name": "asl", "weight": 0.5},
}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parts")
    render_shapes(root, n_query=6, n_train=60, n_database=6, size=48, seed=2)
    return root


def curves(run: Run) -> np.ndarray:
    return np.array([[value for key, value in row.items() if "loss" in key or "val" in key] for row in read_log(run)])


def test_two_processes_give_the_curve_of_one_with_the_same_global_batch(pictures, tmp_path):
    # With a small rate: with a larger one batch norm amplifies rounding to a percent within a few steps.
    batch_norm = {"model": {"backbone": "resnet18", "head": "linear_bn"}, "optimizer": {"lr": 1e-5}}
    for name, sections in {"everything": EVERYTHING, "batch norm": batch_norm}.items():
        one = fit(config(pictures, **sections), out=tmp_path / name / "one")
        two = fit(config(pictures, train={"devices": 2}, **sections), out=tmp_path / name / "two")
        found, expected = curves(two.run), curves(one.run)
        np.testing.assert_allclose(found[:, :-1], expected[:, :-1], rtol=2e-3)
        np.testing.assert_allclose(found[:, -1], expected[:, -1], atol=0.02)  # rounding can flip a bit of a code
        assert two.best_epoch == one.best_epoch


def test_an_error_in_any_process_is_raised_as_in_one_process(pictures, tmp_path):
    fit(config(pictures, train={"epochs": 1}), out=tmp_path / "run")
    with pytest.raises(BadConfig, match="--resume"):
        fit(config(pictures, train={"epochs": 1, "devices": 2}), out=tmp_path / "run")
    with pytest.raises(BadConfig, match="4096 devices"):
        fit(config(pictures, train={"devices": 4096, "batch_size": 4096}), out=tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        fit(config(pictures, train={"devices": 2}), out=tmp_path / "file" / "run")
    with pytest.raises(BadDataset, match="train.devices = 2"):
        fit(config(pictures, train={"devices": 2, "val_fraction": 0.98}), out=tmp_path / "few")


def _statistics(fabric) -> list[list[float]]:
    """Running statistics that differ by process, averaged; outputs and gradients of a shared batch norm."""
    norm = nn.BatchNorm1d(2)
    norm.running_mean += torch.tensor([1.0, 4.0]) * fabric.global_rank
    average_buffers(nn.Sequential(norm), None)
    return [norm.running_mean.tolist(), norm.running_var.tolist()]


def test_running_statistics_are_averaged_over_processes():
    assert launch(_statistics, device="cpu", devices=2, precision="fp32") == [[0.5, 2.0], [1.0, 1.0]]


def _normalised(fabric) -> list[np.ndarray]:
    """Outputs, gradients and running statistics of a batch norm whose 8 rows the processes share unequally."""
    rows = torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(0)) * 2 + 5
    slopes = torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    norm = nn.BatchNorm2d(3)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(2))
    several = fabric.world_size > 1
    own = slice(0, 8)
    if several:
        share_batch_norm(norm)
        own = slice(0, 3) if fabric.global_rank == 0 else slice(3, 8)
    mine = rows[own].clone().requires_grad_()
    outputs = norm(mine)
    (outputs * slopes[own]).sum().backward()
    gradients = [norm.weight.grad, norm.bias.grad]
    if several:
        sum_gradients(norm.parameters())
    of_all = [gather_rows(part.detach()) if several else part.detach() for part in (outputs, mine.grad)]
    return [part.numpy() for part in (*of_all, *gradients, norm.running_mean, norm.running_var)]


def test_batch_norm_over_two_processes_is_that_of_one():
    one, two = (launch(_normalised, device="cpu", devices=n, precision="fp32") for n in (1, 2))
    for of_one, of_two in zip(one, two, strict=True):
        np.testing.assert_allclose(of_two, of_one, rtol=1e-5, atol=1e-5)


def _closing(fabric) -> str:
    """Abort, as one process did in CI, unless the process group is closed before the interpreter shuts down."""
    atexit.register(lambda: os.abort() if dist.is_initialized() else None)
    return "done"


def _dying_after_its_work(fabric) -> str:
    if fabric.global_rank == 1:
        atexit.register(os.abort)
    return "done"


def _dying_at_work(fabric) -> None:
    if fabric.global_rank == 1:
        os.abort()
    dist.barrier()


def test_a_process_that_dies_after_its_work_costs_nothing_and_one_that_dies_at_work_is_named(caplog):
    caplog.set_level(logging.WARNING, logger="hashseek.training")
    assert launch(_closing, device="cpu", devices=2, precision="fp32") == "done"
    assert not caplog.messages
    assert launch(_dying_after_its_work, device="cpu", devices=2, precision="fp32") == "done"
    assert [record.name for record in caplog.records].count("hashseek.training.loop.parallel") == 1
    with pytest.raises(HashseekError, match="process 1 of 2 .*SIGABRT"):
        launch(_dying_at_work, device="cpu", devices=2, precision="fp32")


def test_every_row_is_worked_on_by_one_process_and_batches_are_the_same():
    order = np.random.default_rng(0).permutation(53)
    for n_ranks, batch_size in ((1, 8), (2, 8), (4, 8), (2, 64)):
        share = batch_size // n_ranks
        parts = [own_part(order, batch_size=batch_size, rank=rank, n_ranks=n_ranks) for rank in range(n_ranks)]
        assert sorted(np.concatenate(parts).tolist()) == list(range(53))
        for step in range(53 // batch_size):
            joined = np.concatenate([part[step * share : (step + 1) * share] for part in parts])
            assert joined.tolist() == order[step * batch_size : (step + 1) * batch_size].tolist()
    assert len(own_part(np.arange(17), batch_size=8, rank=0, n_ranks=1)) == 16  # one row is no batch
    assert len(own_part(np.arange(1), batch_size=8, rank=0, n_ranks=1)) == 1  # unless it is all there is
    assert [n_batches(n, batch_size=8, n_ranks=4) for n in (1, 8, 11, 12)] == [1, 1, 1, 2]
