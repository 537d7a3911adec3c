"""Implementations of fused softmax attention."""
