"""Comparison of predictions with measurements, both published ones and those made on this machine."""
