"""Dense softmax attention."""
