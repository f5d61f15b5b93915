"""Strategies, one folder each, and `bucketed` and `sharded`, the base classes of data-parallel and ZeRO strategies."""
