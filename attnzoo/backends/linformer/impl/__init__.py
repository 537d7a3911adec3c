"""Implementations of Linformer."""
