"""The window hybrid in C++, for CPUs."""
