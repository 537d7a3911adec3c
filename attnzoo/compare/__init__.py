"""``attnzoo compare`` and ``inspect``: time, memory and quality over length; attention maps."""
