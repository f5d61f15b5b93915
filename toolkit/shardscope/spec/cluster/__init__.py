"""Clusters that jobs run on: devices, the links between them, nodes, and their prices."""

from shardscope.spec.cluster.cluster import Cluster
from shardscope.spec.cluster.parts import Device
from shardscope.spec.link import Link

__all__ = ["Cluster", "Device", "Link"]
