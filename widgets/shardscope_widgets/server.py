"""A Jupyter server extension that sets TCP_NODELAY on the connections between browsers and kernels.

Jupyter's server keeps TCP's default (Nagle's algorithm): a small packet waits until the previous packet is
acknowledged, which takes up to 40 ms if the browser's machine delays acknowledgements. The answer to a slider consists
of several small messages, and would arrive up to 40 ms late.
"""

from __future__ import annotations

from typing import Any

from jupyter_server.serverapp import ServerApp
from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection

_SETTING = "kernel_websocket_connection_class"


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(app: ServerApp) -> None:
    kind = app.web_app.settings[_SETTING]
    if issubclass(kind, ZMQChannelsWebsocketConnection):  # a gateway's connection has its own socket
        app.web_app.settings[_SETTING] = undelayed(kind)


def undelayed(kind: type[Any]) -> type[Any]:
    """Return a subclass of a browser-kernel connection class that sets TCP_NODELAY, so small packets leave at once."""

    class Undelayed(kind):  # type: ignore[misc]
        def connect(self) -> Any:
            self.websocket_handler.set_nodelay(True)
            return super().connect()

    return Undelayed
