"""C++ and Triton kernels of block-sparse attention."""
