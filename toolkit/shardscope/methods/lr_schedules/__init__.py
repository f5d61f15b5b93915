"""Learning-rate schedules, a folder each."""
