"""Addresses of this machine: which one others reach, over which interface, and whether a port answers. No torch."""

from __future__ import annotations

import socket
import struct
import sys
import time

_SIOCGIFADDR = 0x8915  # Linux, netdevice(7): address of an interface
_ANY_PORT = 9


def route_to(host: str) -> str:
    """This machine's own address on the way to ``host``; empty when there is no way, or no such host.

    Sends nothing: a datagram socket that is connected only chooses a route.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """Name of the interface that carries this IPv4 address; empty when none does, and where it cannot be asked."""
    if not sys.platform.startswith("linux"):
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def is_here(host: str) -> bool:
    """Whether ``host`` names an address of this machine."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def wait_for(host: str, port: int, seconds: float, pause: float = 0.2) -> str:
    """Wait until something accepts connections at ``host:port``.

    Args:
        host, port: where.
        seconds: how long to try.
        pause: seconds between two attempts.

    Returns:
        Empty when something accepts; else the operating system's last reason why nothing did.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(3.0, end - time.monotonic()))).close()
        except OSError as error:
            if time.monotonic() + pause >= end:
                return error.strerror or str(error) or type(error).__name__
        else:
            return ""
        time.sleep(pause)
