"""One folder per mechanism; :mod:`attnzoo.registry` imports a backend when it is first used."""
