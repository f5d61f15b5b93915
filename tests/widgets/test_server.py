"""The server extension: what it does to a connection, and that `shardscope lab` enables it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from jupyter_server.services.kernels.connection.base import BaseKernelWebsocketConnection
from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection

from shardscope.commands.lab import EXTENSIONS, lab_command
from shardscope_widgets import server


class Handler:
    delayed = True

    def set_nodelay(self, value):
        self.delayed = not value


class Connection:
    def __init__(self):
        self.websocket_handler = Handler()

    def connect(self):
        return "connected"


def test_small_packets_are_not_held_back():
    connection = server.undelayed(Connection)()
    assert connection.connect() == "connected"
    assert not connection.websocket_handler.delayed


def test_only_jupyters_own_connections_are_replaced():
    kinds = {}
    for kind in (ZMQChannelsWebsocketConnection, BaseKernelWebsocketConnection):
        settings = {"kernel_websocket_connection_class": kind}
        server._load_jupyter_server_extension(SimpleNamespace(web_app=SimpleNamespace(settings=settings)))
        kinds[kind] = settings["kernel_websocket_connection_class"]
    own, gateway = kinds
    assert issubclass(kinds[own], own)
    assert kinds[own] is not own
    assert kinds[gateway] is gateway


def test_the_lab_enables_both_by_their_names():
    command = lab_command(Path(), port=None, browser=False)
    for extension in EXTENSIONS:
        assert import_module(extension)._jupyter_server_extension_points() == [{"module": extension}]
        assert f"--ServerApp.jpserver_extensions={extension}=True" in command
