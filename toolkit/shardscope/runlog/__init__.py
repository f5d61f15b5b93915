"""A run's events: written by its ranks, read while they grow, and reduced once for all readers."""
