"""A run beside its prediction, term by term."""
