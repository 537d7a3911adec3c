"""C++ and Triton kernels of softmax attention inside a window."""
