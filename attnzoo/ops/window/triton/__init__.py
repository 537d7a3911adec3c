"""Softmax inside a sliding window in Triton, for NVIDIA GPUs."""
