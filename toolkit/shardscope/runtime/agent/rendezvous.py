"""A rendezvous backend that listens on loopback only, for ranks that all run on one machine.

torch's own rendezvous backends open their store on every network interface. Elastic accepts custom backends; this one
gives torch's store a socket that is already bound to 127.0.0.1, on a port chosen by the system.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "shardscope-loopback"
_HOST = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """Rendezvous of a single agent that is always present; the ranks use the agent's store."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: dist.TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = _loopback_store()
        store = dist.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


def _loopback_store() -> dist.TCPStore:
    listener = socket.socket()
    listener.bind((_HOST, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        _HOST, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def register() -> None:
    """Register the backend with elastic, unless it is already registered."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        return LoopbackRendezvous(parameters.run_id)

    if BACKEND not in rendezvous_handler_registry._registry:  # noqa: SLF001
        rendezvous_handler_registry.register(BACKEND, create)
