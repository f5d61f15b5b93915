"""The machines a job is put on: devices, the links between them, nodes, and what they cost."""

from shardscope.spec.cluster.cluster import Cluster
from shardscope.spec.cluster.parts import Device
from shardscope.spec.link import Link

__all__ = ["Cluster", "Device", "Link"]
