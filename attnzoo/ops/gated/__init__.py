"""What mLSTM, RWKV-6 and the full-matrix gate share: inputs, steps, and sums."""
