"""What keeps a collection in order: backups, exchange, another model, repair, calibration."""
