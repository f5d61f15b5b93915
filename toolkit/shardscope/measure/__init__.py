"""Comparison of predictions with measurements: published ones, and those of this machine."""
