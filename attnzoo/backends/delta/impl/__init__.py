"""Implementations of the delta rule."""
