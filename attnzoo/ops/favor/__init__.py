"""FAVOR+ attention."""
