"""Clusters: devices, the links between devices and between nodes, and prices."""

from shardscope.spec.cluster.cluster import Cluster
from shardscope.spec.cluster.emulated import EmulatedCluster
from shardscope.spec.cluster.parts import Device
from shardscope.spec.link import Link

__all__ = ["Cluster", "Device", "EmulatedCluster", "Link"]
