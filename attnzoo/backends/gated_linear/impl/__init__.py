"""Implementations of recurrences that linear attention does not cover."""
