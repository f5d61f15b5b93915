"""A compressor that keeps some of the numbers."""

from __future__ import annotations

from typing import Any

import shardscope as ss


class FirstHalf(ss.PackedCompression):
    """Sends the first half of the numbers as floats of 16 bits; the rest waits."""

    name = "first-half"

    share: float = 0.5
    feedback: bool = True

    def packet_bytes(self, num_elements: int) -> int:
        return 2 * int(self.share * num_elements)

    def codec(self) -> Any:
        from tidewater._torch import keep_first

        return ss.SimpleCodec(self.packet_bytes, *keep_first(self.share))
