"""The run log: write the events of each rank, read them while the run continues, and reduce them to metrics."""
