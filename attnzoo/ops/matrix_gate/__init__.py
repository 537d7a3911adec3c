"""Linear attention with one decay per pair of key and value channels (arXiv:2312.06635)."""
