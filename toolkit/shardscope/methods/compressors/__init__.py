"""Gradient compression methods, each in its own folder, and the base classes that several of them share."""
