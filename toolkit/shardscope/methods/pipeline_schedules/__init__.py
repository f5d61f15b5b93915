"""Schedules of pipelines, a folder each."""
