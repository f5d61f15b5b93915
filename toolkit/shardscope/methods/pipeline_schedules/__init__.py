"""Pipeline schedules, one folder each."""
