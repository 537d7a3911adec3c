"""RWKV-6: a query reads the state before its own token enters it (arXiv:2404.05892)."""
