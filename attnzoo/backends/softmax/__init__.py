"""Dense softmax attention: the exact reference, which can return its weights."""
