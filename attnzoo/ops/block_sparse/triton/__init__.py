"""Block-sparse attention in Triton, for NVIDIA GPUs."""
