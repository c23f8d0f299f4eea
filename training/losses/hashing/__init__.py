"""Hashing losses and quantizers, one file per method."""
