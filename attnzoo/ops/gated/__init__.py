"""Gated recurrences that are more than a decay."""
