"""Evaluation of checkpoints: retrieval figures, reports, the linear probe."""
