"""Which devices there are, and how many processors may be used."""

import os

import pytest
import torch

from hashseek.retrieval import devices
from hashseek.retrieval.errors import BadConfig


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("2500000 1000000", 2),
        ("6400000 100000", 3),
        ("max 100000", 3),
        (None, 3),
    ],
)
def test_the_limit_of_a_container_counts_beside_the_affinity(tmp_path, monkeypatch, content, expected):
    """As Kubernetes and Docker set it: microseconds of processor time in a period of so many microseconds."""
    file = tmp_path / "cpu.max"
    if content is not None:
        file.write_text(f"{content}\n")
    devices._cpu_limit.cache_clear()  # pytest uses the folder of a test that has passed again
    monkeypatch.setattr(devices, "CPU_MAX", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)  # it knows nothing of the limit
    assert devices.n_cores() == devices.n_threads() == expected


@pytest.mark.parametrize("name", ["gpu", "mps", "xpu", "meta", "cuda:99"])
def test_a_device_of_another_kind_is_refused(name):
    with pytest.raises(BadConfig, match=name):
        devices.is_cpu(name)


def test_cpu_is_a_device():
    assert devices.is_cpu("cpu")
    assert devices.pick_device("cpu:0").type == "cpu"
