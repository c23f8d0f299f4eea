"""Data sets, losses and the loop that make a hash model."""
