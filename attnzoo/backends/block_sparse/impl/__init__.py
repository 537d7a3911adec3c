"""Implementations of block-sparse attention."""
