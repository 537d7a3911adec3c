"""Linear attention in C++, for CPUs."""
