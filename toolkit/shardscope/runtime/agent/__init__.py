"""The agent of a run, which starts, watches and restarts the ranks; and the modules that ranks need to work with it."""
