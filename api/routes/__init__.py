"""HTTP routes, one file per group."""
