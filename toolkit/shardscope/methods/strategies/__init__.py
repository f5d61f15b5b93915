"""Strategies, one folder each; `bucketed` and `sharded` are the bases of data-parallel and ZeRO strategies."""
