"""Implementations of Longformer attention."""
