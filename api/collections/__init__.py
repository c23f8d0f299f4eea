"""The collection that is served: loaded, followed when it changes, added to."""
