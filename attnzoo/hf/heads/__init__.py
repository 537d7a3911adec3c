"""Remove attention heads of a model."""
