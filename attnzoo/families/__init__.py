"""The recorded results of the sweep over model families (``tools/family_sweep``)."""
