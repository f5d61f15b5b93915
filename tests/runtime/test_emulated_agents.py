"""The agents of emulated nodes as their coordinator sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from conformance.runs import wait_for
from shardscope.runtime.emulated.coordinator import _NodeAgent
from shardscope.runtime.emulated.node import NodeResult

RESULT = NodeResult("failed", failures={1: -9}, traceback="x" * 200_000)


class Started(_NodeAgent):
    """An agent whose pipe this process holds open as well, as ranks do that outlive it."""

    def __init__(self, code: str) -> None:
        read, self.write = os.pipe()
        os.set_blocking(read, False)
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", f"import os, sys; pipe = {self.write}; {code}"],
            stdin=subprocess.PIPE, pass_fds=[self.write],
        )  # fmt: skip
        super().__init__(self.process.pid, read)

    def ends(self) -> bool:
        self.poll()
        return self.has_ended


@pytest.fixture
def start() -> Iterator[type[Started]]:
    agents: list[Started] = []

    class Noted(Started):
        def __init__(self, code: str) -> None:
            super().__init__(code)
            agents.append(self)

    yield Noted
    for agent in agents:
        agent.process.kill()
        agent.process.communicate()
        os.close(agent.write)


def test_a_result_is_taken_when_its_agent_ends_whoever_holds_the_pipe(start: type[Started]) -> None:
    agent = start("os.write(pipe, sys.stdin.buffer.read())")
    assert not agent.ends()
    assert agent.process.stdin is not None
    agent.process.stdin.write(RESULT.to_json())
    agent.process.stdin.close()
    wait_for(agent.ends)
    assert agent.result == RESULT
    assert agent.has_failed


@pytest.mark.parametrize("written", [b"", RESULT.to_json()[:100]])
def test_an_agent_that_ends_without_a_whole_result_leaves_its_exit_code(
    start: type[Started], written: bytes
) -> None:
    agent = start(f"os.write(pipe, {written!r}); os.kill(os.getpid(), 9)")
    wait_for(agent.ends)
    assert agent.result is None
    assert agent.exit_code == -9
