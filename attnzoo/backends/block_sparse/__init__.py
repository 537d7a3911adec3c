"""Block-sparse attention: softmax over a window, the first tokens and the best key blocks."""
