"""Strategies, a folder each; `bucketed` and `sharded` hold what data-parallel and ZeRO strategies share."""
