"""What reports are made with: numbers as text, self-contained pages, pictures."""
