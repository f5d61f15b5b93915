"""Search for settings by real runs: studies, populations, batch-size sweeps and learning-rate range tests."""
