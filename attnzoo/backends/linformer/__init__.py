"""Linformer: keys and values projected along the sequence (arXiv:2006.04768)."""
