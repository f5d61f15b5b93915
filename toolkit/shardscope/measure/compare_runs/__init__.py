"""Several runs compared with each other: the settings in which they differ, and their results."""
