"""What the service tells about itself: log lines, figures, traces."""
