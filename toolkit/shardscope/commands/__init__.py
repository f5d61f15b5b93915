"""The `shardscope` commands, one module per command. Each module adds its arguments and carries out its command."""
