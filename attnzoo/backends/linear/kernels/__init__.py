"""C++ and Triton kernels of linear attention."""
