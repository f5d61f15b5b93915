"""Optimizers, a folder each."""
