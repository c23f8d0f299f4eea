"""Monitoring of the service: log lines, metrics, traces."""
