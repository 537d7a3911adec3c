"""Feature maps as functions."""
