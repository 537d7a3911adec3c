"""C++ kernels of the delta rule."""
