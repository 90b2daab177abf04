"""Where the workers of one machine meet, open before torch is there: workers start while the launcher imports it."""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import Any, final

from drivetrain.errors import LaunchError

LOOPBACK = "127.0.0.1"
"""A container's own host name often does not resolve."""

_CPP_LOG = "TORCH_CPP_LOG_LEVEL"
_BACKLOG = 4096
"""Connections that wait for the store; the system cuts it to its own limit."""


@final
class Host:
    """A port that listens from now on, and torch's store behind it as soon as a thread has imported torch.

    Workers import torch at the same time; those that are quicker wait in the socket's queue. One for each start of
    workers, since keys of dead ones mislead.

    Args:
        port: 0 takes a free one.

    Raises:
        LaunchError: the port is taken.
    """

    def __init__(self, port: int = 0) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK, port))
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise port_taken(port) from None
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._closed = False
        self._store: Any = None
        self._error: Exception | None = None

    def serve(self) -> None:
        """Let a thread import torch and open the store. Python cannot end before it has imported it."""
        threading.Thread(target=self._serve, name="drivetrain-store").start()

    def check(self) -> None:
        """Raises what kept the store from opening: the workers would wait for it in vain."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Give the port back. May be called twice, and while torch is still being imported."""
        with self._lock:
            self._closed, self._store = True, None
            self._socket.close()

    def _serve(self) -> None:
        try:
            import_torch_quietly()
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            with self._lock:
                if not self._closed:
                    listening = self._socket.detach()  # the store's from here on
                    self._store = TCPStore(
                        LOOPBACK, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening
                    )
        except Exception as error:  # noqa: BLE001 - raised by check(), in the main thread
            self._error = error


def port_taken(port: int) -> LaunchError:
    """The sentence about a port that another program has."""
    return LaunchError(
        f"port {port} of this machine is taken", cure="Write another main_process_port, or 0 for a free one."
    )


def import_torch_quietly() -> None:
    """Its stores warn about host names without a reverse entry, and print a stack for a connection that is gone."""
    if _CPP_LOG in os.environ:
        return
    os.environ[_CPP_LOG] = "ERROR"
    import torch.distributed  # noqa: F401 - reads the variable, once

    os.environ.pop(_CPP_LOG, None)
