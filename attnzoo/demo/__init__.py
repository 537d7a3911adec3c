"""``attnzoo demo``: every backend on one pretrained model, with its quality and decoding cost."""
