"""What a Valkey server is set to, as far as a fabric depends on it. Reads `INFO` only, which every user may."""

from __future__ import annotations

from dataclasses import dataclass

from dispatch.errors import DispatchError
from dispatch.fabric.redis_shared import redis_errors
from dispatch.fabric.sync import BlockingConnection


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One primary. `problem` says why it could not be asked; the rest means nothing then."""

    address: str
    eviction: str = ""
    aof: bool = False
    problem: str = ""

    def advice(self) -> list[str]:
        """Return a sentence for each setting with which a fabric may lose requests."""
        if self.problem:
            return []
        found = []
        if self.eviction != "noeviction":
            found.append(
                f"{self.address}: maxmemory-policy is {self.eviction}, so a full server removes requests and counters; "
                "set it to noeviction"
            )
        if not self.aof:
            found.append(
                f"{self.address}: there is no append-only file, so waiting requests do not outlive the server; "
                "set appendonly yes"
            )
        return found


def read_settings(connection: BlockingConnection) -> list[ServerSettings]:
    """Read the settings of every primary; one that does not answer is a row with its problem.

    Raises:
        ConfigurationError, FabricUnavailable: the primaries could not be found out.
    """
    rows = []
    for address, client in connection.primary_clients():
        with client:
            try:
                with redis_errors(address):
                    memory, persistence = client.info("memory"), client.info("persistence")
            except DispatchError as error:
                rows.append(ServerSettings(address, problem=str(error)))
                continue
        rows.append(ServerSettings(address, str(memory["maxmemory_policy"]), persistence["aof_enabled"] == 1))
    return rows
