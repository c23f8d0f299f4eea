"""Codes, images, models and figures: everything that search, training and evaluation share."""
