"""What was measured: fitted constants with their intervals, of GPU clusters and of this machine, and their choice."""
