"""Below all mechanisms: the C++ loader, calls of kernels, verdicts about kernels."""
