"""Run the command line with ``python -m attnzoo``."""

from attnzoo.cli import main

main()
