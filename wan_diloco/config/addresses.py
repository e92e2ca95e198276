"""What an address says about who can reach it."""

from __future__ import annotations

import ipaddress

from wan_diloco.errors import ConfigError

__all__ = ["exposed"]


def exposed(listen: str, *, insecure: bool) -> ConfigError | None:
    """Why a syncer must not listen without encryption; None when it may.

    Args:
        listen: "host:port".
        insecure: Whether the operator has said that it may, wherever it listens.
    """
    if insecure or _is_loopback(listen.rpartition(":")[0]):
        return None
    return ConfigError(
        f"{listen} is reachable from outside, and nothing would be encrypted",
        where="syncer.listen",
        hint="listen on 127.0.0.1, or set syncer.insecure = true",
    )


def _is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach a host; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
