"""How many connections a process holds, and how many of one address: counted from the first byte on, before any key."""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus

from dispatch.contract.answers import Meaning, Problem

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

TURNED_AWAY_MAX = 256
"""Connections beyond the bound that are still being told so; more are dropped without a word."""

_V6_PREFIX = 64  # one host has as many addresses below it as it wants

_BUSY = Meaning(HTTPStatus.SERVICE_UNAVAILABLE, "rejected-too_many_connections", retry=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one process. Of `trusted` addresses (proxies) only the first one holds."""

    connections: int = 8192
    per_address: int = 2048
    trusted: tuple[Network, ...] = ()


@dataclass(slots=True)
class Door:
    """Counts who is in. Used by one event loop."""

    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    inside: int = 0
    turned_away: int = 0
    _by_source: Counter[str] = field(default_factory=Counter)

    def enter(self, address: str) -> Problem | None:
        """Count a connection in; returns why not when there are too many (then it is not counted)."""
        limits = self.limits
        if self.inside >= limits.connections:
            return _too_many(f"this gateway has {limits.connections} connections, which is its bound")
        source, trusted = self._source(address)
        if not trusted and self._by_source[source] >= limits.per_address:
            return _too_many(f"{limits.per_address} connections come from this address, which is the bound of one")
        self.inside += 1
        self._by_source[source] += 1
        return None

    def leave(self, address: str) -> None:
        """Count a connection out that was counted in."""
        source, _ = self._source(address)
        self.inside -= 1
        self._by_source[source] -= 1
        if self._by_source[source] <= 0:
            del self._by_source[source]

    def _source(self, address: str) -> tuple[str, bool]:
        """Return for whom an address counts, and whether it is trusted."""
        try:
            ip = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:  # no address: a socket of this machine
            return address, True
        if isinstance(ip, ipaddress.IPv6Address):
            if ip.ipv4_mapped is None:
                return str(ipaddress.ip_network((ip, _V6_PREFIX), strict=False)), self._is_trusted(ip)
            ip = ip.ipv4_mapped
        return str(ip), self._is_trusted(ip)

    def _is_trusted(self, ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        return any(ip in network for network in self.limits.trusted)


def _too_many(what: str) -> Problem:
    return Problem(meaning=_BUSY, message=f"{what}; try again later", code="too_many_connections")
