"""``attnzoo tasks``: synthetic tasks on which small models are trained from scratch."""
