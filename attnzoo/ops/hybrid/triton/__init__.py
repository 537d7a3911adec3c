"""The window hybrid in Triton, for NVIDIA GPUs."""
