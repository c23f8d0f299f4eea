"""Learning rates follow their schedules, and a restored schedule continues them exactly."""

from pathlib import Path

import pytest
import torch

from hashseek.training.loop.optimizers import build_scheduler
from support.models import run_config

STEPS = 10


def schedule(epochs: int, **settings):
    config = run_config(Path(), train__epochs=epochs, optimizer=settings)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, build_scheduler(config, optimizer, steps_per_epoch=STEPS)


def rates(optimizer, scheduler, n_steps: int) -> list[float]:
    found = []
    for _ in range(n_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),  # the rate by epoch
    [
        ({"schedule": "cosine", "warmup_epochs": 2}, {0: 0.0005, 1: 0.5, 2: 1.0, 4: 0.853553, 6: 0.5, 8: 0.146447}),
        ({"schedule": "step", "step_epochs": 3, "step_factor": 0.1}, {0: 1, 2: 1, 3: 0.1, 5: 0.1, 6: 0.01, 9: 0.001}),
        ({"schedule": "restarts", "restart_epochs": 2}, {0: 1, 1: 0.5, 2: 1, 4: 0.5, 6: 1, 8: 0.853553}),
        ({"schedule": "constant"}, {0: 1, 9: 1}),
    ],
)
def test_rates_follow_their_schedule_and_a_restored_one_continues_exactly(settings, expected):
    found = rates(*schedule(10, **settings), 10 * STEPS)
    assert {epoch: found[epoch * STEPS] for epoch in expected} == pytest.approx(expected, abs=1e-3)
    optimizer, scheduler = schedule(10, **settings)
    begun = rates(optimizer, scheduler, 37)
    saved = optimizer.state_dict(), scheduler.state_dict()
    optimizer, scheduler = schedule(10, **settings)
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    assert begun + rates(optimizer, scheduler, 63) == found
