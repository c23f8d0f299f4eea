"""The command line and the HTTP service."""
