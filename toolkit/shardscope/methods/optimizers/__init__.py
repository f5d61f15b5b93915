"""Optimizers, each in its own folder."""
