"""Gates, by name."""
