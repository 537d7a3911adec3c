"""Linear attention in Triton, for NVIDIA GPUs."""
