"""A Jupyter server extension that sends kernels' messages to the page at once.

Jupyter's server leaves TCP's default, by which a small packet waits until the one before it is acknowledged, and the
browser's machine acknowledges after up to 40 ms if it has nothing to send. An answer to a slider is several small
messages, so it would arrive these 40 ms late.
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
    """Return a subclass of a connection between page and kernel whose small packets are not held back."""

    class Undelayed(kind):  # type: ignore[misc]
        def connect(self) -> Any:
            self.websocket_handler.set_nodelay(True)
            return super().connect()

    return Undelayed
