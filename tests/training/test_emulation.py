"""What a rank on an emulated node emulates itself."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.training.emulation import Emulation


@pytest.mark.parametrize(
    ("nodes", "in_kernel", "paced"), [(2, False, True), (2, True, False), (1, False, False)]
)
def test_a_rank_delays_messages_if_they_go_to_other_nodes_and_the_kernel_does_not(
    nodes: int, in_kernel: bool, paced: bool
) -> None:
    emulation = Emulation(ss.Cluster.emulated(nodes, latency="1 ms", per_node=2), 0, in_kernel)
    assert (emulation.paced_link is not None) == paced
    assert ("adds the latency" in str(emulation.described()["note"])) == paced


def test_a_link_that_nothing_is_sent_over_is_accurate() -> None:
    clusters = [ss.Cluster.emulated(nodes, "100 Gbit/s", per_node=2) for nodes in (1, 2)]
    described = [Emulation(cluster, 0, delays_in_kernel=False).described() for cluster in clusters]
    assert [each["is_accurate"] for each in described] == [True, False]
