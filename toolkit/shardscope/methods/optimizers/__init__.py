"""Optimizers, one folder each."""
