"""Fit the constants of this machine, or of a cluster emulated on it, to short real runs; see `shardscope.calibrate`."""
