"""Predictions for a job or a layout: bytes sent, memory and step time."""
