"""Performer: FAVOR+ positive random features (arXiv:2009.14794)."""
