"""Comparison of a run with its prediction, term by term."""
