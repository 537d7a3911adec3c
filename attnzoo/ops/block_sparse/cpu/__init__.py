"""Block-sparse attention in C++, for CPUs."""
