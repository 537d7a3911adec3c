"""Gated linear attention: RetNet, Mamba-2, GLA, HGRN-2, RWKV-6, mLSTM."""
