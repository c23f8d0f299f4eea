"""Evaluation of checkpoints: retrieval metrics, reports, the linear probe."""
