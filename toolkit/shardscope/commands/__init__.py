"""The `shardscope` commands, one module per command. Each module adds its arguments and runs its command."""
