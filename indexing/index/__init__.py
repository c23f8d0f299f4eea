"""Hamming search by kind: what `hashseek.indexing.index.hamming_index` is made of."""
