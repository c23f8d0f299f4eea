"""Who and what is let in: API keys, limits of requests, limits of connections."""
