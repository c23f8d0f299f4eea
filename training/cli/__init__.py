"""Subcommands that train and evaluate; each is loaded when called, so that help does not wait for torch."""
