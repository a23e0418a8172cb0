"""Names and addresses by which a machine means itself."""

from __future__ import annotations

import ipaddress


def is_loopback_name(name: str) -> bool:
    """Say whether a host name or address can mean nothing but this machine (RFC 6761 section 6.3, RFC 6890)."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
