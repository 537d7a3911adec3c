"""Attention by locality-sensitive hashing."""
