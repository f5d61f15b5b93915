"""Stand-in for `IPython.core`."""
