"""Published tables, reproduced: one module per experiment, with our scores beside the published ones.

Run from a checkout with `python -m experiments`; not part of the installed package.
"""
