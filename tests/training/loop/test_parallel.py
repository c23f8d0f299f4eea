"""Several processes share batch norm, rows and queues of keys, and say which of them died.

`test_torchrun.py` compares their curves with those of one process. Nothing here imports `fit`, which every process
would have to import, too.
"""

import atexit
import os
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hashseek.retrieval.errors import BadCodes, BadConfig, HashseekError
from hashseek.training.collectives import gather_rows, sum_gradients
from hashseek.training.loop.parallel import launch, n_batches, own_part
from hashseek.training.loop.sync_batch_norm import share_batch_norm
from hashseek.training.losses.memory import KeyQueue


def _normalised(fabric) -> list[np.ndarray]:
    """Outputs, gradients and running statistics of a batch norm whose 8 rows the processes share unequally."""
    rows = torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(0)) * 2 + 5
    slopes = torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    norm = nn.BatchNorm2d(3)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(2))
    several = fabric.world_size > 1
    own = slice(0, 8)
    if several:
        enqueue(fabric.global_rank)
        share_batch_norm(norm)
        own = slice(0, 3) if fabric.global_rank == 0 else slice(3, 8)
        # As one process did in CI: abort if the process group is open when the interpreter shuts down.
        atexit.register(lambda: os.abort() if dist.is_initialized() else None)
    mine = rows[own].clone().requires_grad_()
    outputs = norm(mine)
    (outputs * slopes[own]).sum().backward()
    gradients = [norm.weight.grad, norm.bias.grad]
    if several:
        sum_gradients(norm.parameters())
    of_all = [gather_rows(part.detach()) if several else part.detach() for part in (outputs, mine.grad)]
    statistics = norm.running_mean, norm.running_var
    if several:  # every process has the same
        assert all(torch.equal(*gather_rows(values[None])) for values in statistics)
    return [part.numpy() for part in (*of_all, *gradients, *statistics)]


def enqueue(rank: int) -> None:
    """The keys of both processes, which differ in number, are in the queue in the order of ranks."""
    keys, labels = F.normalize(torch.randn(8, 5, generator=torch.Generator().manual_seed(0))), torch.eye(4).repeat(2, 1)
    queue = KeyQueue(n_classes=4, n_bits=5, size=7)
    for parts in ((slice(0, 2), slice(2, 5)), (slice(5, 6), slice(6, 6))):
        queue.enqueue(keys[parts[rank]], labels[parts[rank]])
    torch.testing.assert_close(queue.memory().ref, keys[:6])
    assert torch.equal(queue.memory().ref_y, labels[:6])
    torch.testing.assert_close(queue.memory(keys[6:], labels[6:]).ref[:2], keys[6:])  # own keys alone
    with pytest.raises(BadCodes, match="8"):
        queue.enqueue(keys[:4], labels[:4])


def test_batch_norm_and_queue_of_two_processes_are_those_of_one_in_a_slurm_job_too(monkeypatch):
    job = {"NTASKS": "2", "JOB_NAME": "job", "JOB_ID": "7003", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    one, two = (launch(_normalised, device="cpu", devices=n, precision="fp32") for n in (1, 2))
    for of_one, of_two in zip(one, two, strict=True):
        np.testing.assert_allclose(of_two, of_one, rtol=1e-5, atol=1e-5)


def test_several_processes_are_refused_in_a_notebook(monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In [1]:", raising=False)
    with pytest.raises(BadConfig, match="train.devices"):
        launch(_dying, device="cpu", devices=2, precision="fp32")


def test_a_batch_norm_with_an_activation_inside_is_refused():
    timm_layers = pytest.importorskip("timm.layers")
    norm = timm_layers.BatchNormAct2d(3)
    share_batch_norm(norm)
    with pytest.raises(BadConfig, match="BatchNormAct2d"):
        norm(torch.zeros(2, 3, 4, 4))
    assert norm.eval()(torch.zeros(2, 3, 4, 4)).shape == (2, 3, 4, 4)


def _dying(fabric) -> None:
    if fabric.global_rank == 1:
        os.abort()
    dist.barrier()


def test_a_process_that_dies_is_named():
    with pytest.raises(HashseekError, match="process 1 of 2 .*SIGABRT"):
        launch(_dying, device="cpu", devices=2, precision="fp32")


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
    assert [n_batches(n, batch_size=8, n_ranks=4) for n in (4, 8, 11, 12)] == [1, 1, 1, 2]
