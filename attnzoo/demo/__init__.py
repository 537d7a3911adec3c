"""The main job end to end: swap a model's attention, and show what it costs and what it saves."""
