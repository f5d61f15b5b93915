"""Every built-in method of compression passes what a third party's must; the harder classes are in `conformance`."""

from __future__ import annotations

import pytest

from shardscope import Compression
from shardscope.conformance import CompressionConformance
from shardscope.spec.registry import names, require_known


@pytest.mark.parametrize("name", [name for name in names(Compression) if name != "none"])
class TestCodecs:
    @pytest.mark.sampled
    def test_packets_and_codecs(self, name: str) -> None:
        tests = CompressionConformance()
        tests.method = require_known(Compression, name)  # type: ignore[misc]  # of this instance only
        tests.test_packets_are_as_long_as_it_says()
        tests.test_a_codec_does_what_its_docstrings_say()


class TestInt8(CompressionConformance):
    method = require_known(Compression, "int8")
