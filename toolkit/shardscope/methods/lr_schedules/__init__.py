"""Learning-rate schedules, each in its own folder."""
