"""C++ kernels of block-sparse attention."""
