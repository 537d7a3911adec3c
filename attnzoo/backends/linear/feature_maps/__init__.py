"""Feature maps of queries and keys: fixed, learned and random."""
