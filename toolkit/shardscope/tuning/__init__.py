"""Finding settings by real runs: studies, populations, sweeps of the batch, tests of a learning rate's range."""
