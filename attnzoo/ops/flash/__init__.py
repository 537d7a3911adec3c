"""Softmax attention by fused kernels."""
