"""Transports, which carry the communication of a process group between its ranks.

    tcp         gloo's connections, or NCCL between GPUs; between any ranks, on any hosts
    shm         shared memory, between CPU ranks of one Linux host
    cuda-ipc    GPU memory that the ranks of one Linux host read, and shared memory for tensors in CPU memory

The collectives, the parameter server, pipelines, compression and FSDP2 use a `MeteredProcessGroup`, and do not depend
on the transport.
"""

from shardscope.training.transports.choice import Name, Route, open_route
from shardscope.training.transports.protocol import Transport

__all__ = ["Name", "Route", "Transport", "open_route"]
