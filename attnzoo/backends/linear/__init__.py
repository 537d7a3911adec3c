"""Linear attention: feature maps and a state of fixed size (arXiv:2006.16236)."""
