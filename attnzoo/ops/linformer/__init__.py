"""Linformer attention."""
