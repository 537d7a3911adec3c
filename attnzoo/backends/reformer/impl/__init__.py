"""Implementations of LSH attention."""
