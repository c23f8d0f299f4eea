"""Hamming indexes: exact and approximate kinds, and the index of a collection in memory and on disk."""
