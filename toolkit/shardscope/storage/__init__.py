"""Training data in shards on disk: writes, opens, caches and reads them with NumPy, without torch.

`open_shards` lists the shards of a `spec.shards.Shards`, whatever their format. A `ShardReader` opens them as
memory-mapped arrays: `.npy` shards in place, and all others from a `ShardCache`, into which they are unpacked.
"""
