"""Longformer attention."""
