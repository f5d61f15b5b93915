"""From `launch` to the agent of a run: checks before the start, and the warm server that agents are forked from."""
