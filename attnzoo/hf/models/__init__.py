"""Changes of single model families beside a swap."""
