"""Learning-rate schedules, one folder each."""
