"""An evaluation report: its values, and the files that show them."""
