"""Scaling of a job over numbers of workers: measured by runs, and extrapolated to larger clusters."""
