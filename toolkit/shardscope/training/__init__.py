"""Distributed training as it really runs, in torch."""
