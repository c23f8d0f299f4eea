"""Subcommands that train and evaluate; each is loaded when it is called, so that help need not wait for torch."""
