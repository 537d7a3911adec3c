"""Gates that are more than a decay: mLSTM, RWKV-6 and the full-matrix gate."""
