"""Softmax inside a sliding window."""
