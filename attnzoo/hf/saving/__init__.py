"""Save and load swapped models, and copy the files beside their weights."""
