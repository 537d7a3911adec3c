"""Convert models whose attention layers are all exact to model classes that need no attnzoo."""
