"""Catalog, FAISS index and search over a collection of images."""
