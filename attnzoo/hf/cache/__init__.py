"""States of backends in the caches of transformers."""
