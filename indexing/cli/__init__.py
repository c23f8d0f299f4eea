"""Subcommands `index` and `search`; loaded when they are called, for the help must not wait for torch."""
