"""A run: its directory, its state, and what it has recorded."""
