"""Every model family of the installed transformers under every backend: checked, and recorded.

``python -m attnzoo.families`` sweeps them and writes the record that ``attnzoo families`` prints.
"""
