"""The training loop: what is trained, one step, one epoch, a run."""
