"""Memory of GPUs that ranks on one host share; see `group` for the parts."""

from shardscope.training.transports.cuda_ipc.collectives import STAGED_BYTES
from shardscope.training.transports.cuda_ipc.group import CudaIpcGroup
from shardscope.training.transports.cuda_ipc.memory import CudaMemory
from shardscope.training.transports.cuda_ipc.shards import DeviceShardBuffers

__all__ = ["STAGED_BYTES", "CudaIpcGroup", "CudaMemory", "DeviceShardBuffers"]
