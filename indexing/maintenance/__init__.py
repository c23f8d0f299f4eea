"""Maintenance of collections: snapshots, export and import, re-encoding, optimizing, checks and repair."""
