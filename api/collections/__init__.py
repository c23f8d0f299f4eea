"""The collections that are served: loading them, following their changes, creating and deleting them."""
