"""The real parts of distributed training, in torch."""
