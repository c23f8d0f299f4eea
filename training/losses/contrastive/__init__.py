"""Contrastive losses, one file per method."""
