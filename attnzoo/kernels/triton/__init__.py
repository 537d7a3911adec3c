"""Kernels in Triton, for NVIDIA GPUs, and under ``TRITON_INTERPRET=1`` for the CPU."""
