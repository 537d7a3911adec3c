"""Feature maps, by name."""
