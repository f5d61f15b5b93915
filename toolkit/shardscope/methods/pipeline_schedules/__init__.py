"""Pipeline schedules, each in its own folder."""
