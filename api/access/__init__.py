"""Access control: API keys, limits on requests, limits on connections."""
