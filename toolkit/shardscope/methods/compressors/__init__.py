"""Methods of gradient compression, a folder each, and `packed`, the base of those that are a codec."""
