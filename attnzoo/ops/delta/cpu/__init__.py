"""The delta rule in C++, for CPUs."""
