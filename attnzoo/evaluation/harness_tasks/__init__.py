"""Tasks for lm-evaluation-harness that need no network; the folder is an include path of it."""
