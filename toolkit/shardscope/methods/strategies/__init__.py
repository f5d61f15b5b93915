"""Strategies, each in its own folder; `bucketed` and `sharded` are base classes for data parallelism and ZeRO."""
