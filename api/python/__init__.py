"""Hashseek: image retrieval with deep hashing."""
