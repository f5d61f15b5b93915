"""The parts of the parameter server: when an update is due, messages, the server, and a worker's end of it.

Admission       pure rule: which gradients make up an update, and how stale each is
Message, Link   a header and a flat payload in one message; counted to the byte
Pushes          what a push holds: gradients as they are, or packed
Server          one shard of parameters and its optimizer; a thread a remote worker
Client          a worker's end: push to all servers, pull from all of them
"""

from shardscope.training.parameter_server.admission import Admission, Update
from shardscope.training.parameter_server.client import Client
from shardscope.training.parameter_server.messages import Link, Message, Shard, cut_into_shards
from shardscope.training.parameter_server.pushes import PackedPushes, Pushes
from shardscope.training.parameter_server.server import Server

__all__ = [
    "Admission", "Client", "Link", "Message", "PackedPushes", "Pushes", "Server", "Shard", "Update", "cut_into_shards",
]  # fmt: skip
