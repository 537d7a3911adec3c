"""mLSTM: exponential input gates, stabilised (arXiv:2405.04517)."""
