"""Wheels that carry compiled C++ kernels: built here, tried where there is no compiler."""
