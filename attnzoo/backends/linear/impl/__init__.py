"""Implementations of linear attention."""
