"""The commands of the command line, one function each; heavy modules load inside them."""
