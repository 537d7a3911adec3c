"""Below all mechanisms: the C++ loader, memory, autocast, verdicts about kernels."""
