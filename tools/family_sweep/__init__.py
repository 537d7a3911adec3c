"""Check every model family of the installed transformers under every backend.

``python -m tools.family_sweep`` writes the record, of which docs/families.md is made.
"""
