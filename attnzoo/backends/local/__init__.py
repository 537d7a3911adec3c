"""Sliding-window softmax attention, shared by flash, longformer and the window hybrids."""
