"""Where predictions meet measurements: published ones, and those of this machine."""
