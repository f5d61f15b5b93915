"""Predictions for a job or a layout: bytes sent, bytes held and step time."""
