"""Attention by locality-sensitive hashing in C++, for CPUs."""
