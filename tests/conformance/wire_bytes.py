"""What the kernel saw: bytes on this process's own TCP connections, read from the sockets themselves (Linux).

The meter counts what Shardscope and torch hand to the backend. This reads the other end of the pipe, `TCP_INFO` of
every connected socket, so that the counting can be checked against something that knows nothing of it. On top of the
payload a backend sends headers: gloo three of 48 bytes a message.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

GLOO_HEADER_BYTES = 144
"""Announce, ready, data: what gloo's TCP transport adds to one message, seen on the wire at every size."""

_TCP_INFO = 11
_ACKED_AND_RECEIVED_AT = 120  # offset of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info


@dataclass(frozen=True)
class WireBytes:
    """Bytes over all TCP connections of this process since they were opened."""

    sent: int
    received: int

    def __sub__(self, earlier: WireBytes) -> WireBytes:
        return WireBytes(self.sent - earlier.sent, self.received - earlier.received)


def wire_bytes() -> WireBytes:
    """Bytes sent (and acknowledged) and received so far on all open TCP connections of this process."""
    counts = [count for fd in os.listdir("/proc/self/fd") if (count := _counts(int(fd)))]
    return WireBytes(sum(sent for sent, _ in counts), sum(received for _, received in counts))


def _counts(fd: int) -> tuple[int, int] | None:
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(fd)) as peer:
            peer.getpeername()
            info = peer.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
    except OSError:  # closed meanwhile, not TCP, or not connected
        return None
    sent, received = struct.unpack_from("QQ", info, _ACKED_AND_RECEIVED_AT)
    return sent, received
