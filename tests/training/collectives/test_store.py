"""Ranks that an agent starts again do not read what those before them left in the agent's store."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from shardscope.training.collectives import process_group

TIMEOUT = timedelta(seconds=10)


def test_ranks_that_are_started_again_find_no_addresses_of_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    stores = []
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        stores.append(process_group.store_of_this_start(0, 2, TIMEOUT))
    stores[0].set("address", "one that nobody listens on any more")
    assert stores[0].check(["address"])
    assert not stores[1].check(["address"])
