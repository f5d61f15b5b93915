"""Search for settings by running real training: studies, populations, batch-size sweeps, learning-rate range tests."""
