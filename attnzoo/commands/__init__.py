"""The commands of the command line, one function each; they import heavy modules when they run."""
