"""Explanation of a run: the largest loss of time in its steps, the cause, and a change of the job that reduces it."""
