"""Codes, images, models and metrics: everything that search, training and evaluation share."""
