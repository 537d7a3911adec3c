"""Softmax inside a sliding window in C++, for CPUs."""
