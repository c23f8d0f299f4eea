"""Hamming search by kind: what `indexing.hamming_index` is made of."""
