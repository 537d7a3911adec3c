"""C++ kernels of LSH attention."""
