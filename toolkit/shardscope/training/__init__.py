"""Distributed training in PyTorch: the code that each rank executes."""
