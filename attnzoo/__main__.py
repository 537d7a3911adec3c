"""Runs the command line: ``python -m attnzoo``."""

from attnzoo.cli import main

main()
