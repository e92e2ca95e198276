"""What an address is, and what it says about who can reach it."""

from __future__ import annotations

import ipaddress

from pydantic_core import PydanticCustomError

from wan_diloco.errors import ConfigError

__all__ = ["exposed", "host_port", "store_address"]


def host_port(value: str, *, empty: bool) -> str:
    """A setting that says where somebody listens.

    Args:
        value: As it was given.
        empty: Whether it may be left empty.

    Raises:
        PydanticCustomError: It is something else.
    """
    if empty and not value:
        return value
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise _refuse(f"{value!r} isn't an address", 'write it like "127.0.0.1:7000"')
    return value


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
