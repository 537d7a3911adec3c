"""Longformer: a sliding window with global tokens (arXiv:2004.05150)."""
