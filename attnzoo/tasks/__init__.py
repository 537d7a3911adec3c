"""Small tasks that tell mechanisms apart: generated, seeded, trained from scratch."""
