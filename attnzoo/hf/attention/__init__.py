"""What runs when a layer of a model calls its attention."""
