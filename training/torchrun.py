"""The settings that torchrun passes to the processes that it starts. Does not load torch."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Torchrun:
    """The place of this process: its rank among all and on its host, and how many processes and hosts there are."""

    rank: int
    local_rank: int
    n_processes: int
    n_here: int
    n_hosts: int


def torchrun() -> Torchrun | None:
    """The place of this process, or None if torchrun has not started it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    return Torchrun(*(int(os.environ[name]) for name in names))
