"""What `shardscope <command>` does, a module a command. Each adds its arguments and carries itself out."""
