"""Give the layers of a model other attention, and restore it."""
