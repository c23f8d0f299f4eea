"""One TOML per published or measured result."""
