"""Calibrations: fitted constants of GPU clusters and of this machine, with intervals, and the choice among them."""
