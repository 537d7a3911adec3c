"""Reformer: locality-sensitive hashing (arXiv:2001.04451, arXiv:2010.05315)."""
