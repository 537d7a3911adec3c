"""Exact softmax attention by fused kernels: SDPA or xformers."""
