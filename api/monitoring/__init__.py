"""What the service tells about itself: log lines and figures."""
