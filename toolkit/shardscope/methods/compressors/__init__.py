"""Methods of gradient compression, one folder each, and `packed`, the base of codec-based methods."""
