"""Check the C++ kernels as compiled for 64-bit ARM, under QEMU."""
