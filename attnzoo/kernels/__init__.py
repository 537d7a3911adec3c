"""Code that several mechanisms share; of attnzoo, it imports only errors and masks."""
