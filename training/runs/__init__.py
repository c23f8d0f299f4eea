"""Run folders: what a run writes, how it is followed, and sweeps over many runs."""
