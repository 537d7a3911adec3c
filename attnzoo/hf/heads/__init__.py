"""Remove and group attention heads of a model."""
