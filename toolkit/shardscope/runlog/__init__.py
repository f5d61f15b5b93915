"""A run's events: written by its ranks, read while they are being written, and reduced once for all readers."""
