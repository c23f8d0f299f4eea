"""The collections that are served: loaded, followed when they change, created and deleted."""
