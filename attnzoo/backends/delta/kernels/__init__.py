"""C++ and Triton kernels of the delta rule."""
