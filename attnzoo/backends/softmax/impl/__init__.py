"""Implementations of dense softmax attention."""
