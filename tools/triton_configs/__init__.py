"""Compile the Triton kernels ahead of time, and select and tune their block configs."""
