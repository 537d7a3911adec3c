"""Pure functions on tensors, one per mechanism; each picks who computes it (``impl``)."""
