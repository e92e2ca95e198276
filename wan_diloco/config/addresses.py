"""What an address is, and what it says about who can reach it."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from pydantic_core import PydanticCustomError

from wan_diloco.errors import ConfigError

__all__ = ["exposed", "host_port", "store_address", "why_no_address"]

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


def host_port(value: str, *, empty: bool) -> str:
    """A setting that says where somebody listens.

    Args:
        value: As it was given.
        empty: Whether it may be left empty; it then says where somebody is found, and port 0 is nowhere.

    Raises:
        PydanticCustomError: It is something else.
    """
    if empty and not value:
        return value
    if why_no_address(value, port_min=1 if empty else 0):
        raise _refuse(f"{value!r} isn't an address", 'write it like "127.0.0.1:7000"')
    return value


def why_no_address(value: str, *, port_min: int = 1) -> str:
    """Why a text isn't an address, in a few words; empty where it is one.

    Args:
        value: "host:port"; a host of IPv6 is best written in brackets.
        port_min: 0 where a free port may be asked for.
    """
    host, _, port = value.rpartition(":")
    if not host:
        return "it has no host and port"
    if not port.isascii() or not port.isdigit() or not port_min <= int(port) <= 65535:
        return f"{port!r} is no port"
    return "" if _NAME.fullmatch(host) or _is_ipv6(host) else f"{host!r} is no host"


def _is_ipv6(host: str) -> bool:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ipaddress.IPv6Address(bare)
    except ValueError:
        return False
    return True


def store_address(value: str, *, endpoint: bool) -> str:
    """A setting that says where a store is, or its server; empty for none.

    Args:
        value: As it was given.
        endpoint: Whether it is the server.

    Raises:
        PydanticCustomError: It is something else, or holds a secret, which isn't repeated.
    """
    if "@" in value:
        raise _refuse("holds what looks like a secret", "credentials belong in the environment")
    scheme, separator, rest = value.partition("://")
    is_known = scheme in {"http", "https"} if endpoint else scheme.isalnum()
    if not value or (is_known and separator and rest.strip("/") and value.isprintable()):
        return value
    example = "https://host:port" if endpoint else "s3://bucket/prefix"
    raise _refuse(f"{value!r} isn't an address", f'write it like "{example}"')


def _refuse(problem: str, hint: str) -> PydanticCustomError:
    return PydanticCustomError("address", "{problem}", {"problem": problem, "hint": hint})


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
