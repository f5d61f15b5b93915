"""Gradient compression methods, one folder each, and `packed`, the base of codec-based methods."""
