"""The delta rule in Triton, for NVIDIA GPUs."""
