"""Predictions that use measurements of this machine, and comparisons of predictions with measurements."""
