"""C++ kernels of banded softmax."""
