"""One file per mechanism; :mod:`attnzoo.registry` imports them by name, on demand."""
