"""The window hybrid."""
