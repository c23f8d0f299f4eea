"""Reproductions of published tables: one module per experiment, with our scores next to the published ones.

Run from a checkout with `python -m experiments`; not part of the installed package.
"""
