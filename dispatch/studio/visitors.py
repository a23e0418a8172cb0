"""Who looks at a page, and what he may do."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

SESSION_S = 12 * 3600
_SESSIONS_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Whoever looks. `why` says why he may not act, "" if he may; `actor` is written to the record of what he does."""

    name: str
    actor: str
    role: str
    anonymous: bool = False
    why: str = ""

    @property
    def writes(self) -> bool:
        """Whether he may change things."""
        return not self.why

    def shown(self) -> dict[str, Any]:
        """Return what his page is told of him."""
        return {
            "name": self.name, "role": self.role, "anonymous": self.anonymous, "writes": self.writes, "why": self.why,
        }  # fmt: skip


class Door(Protocol):
    """Knows the keys of one group."""

    async def visitor(self, token: str | None, address: str) -> Visitor:
        """Say who shows `token` (None = nothing), coming from `address`.

        Raises:
            KeyRefused: a key is needed, or this is none.
            NotAllowed: this key may not look at the group.
            FabricUnavailable: that cannot be said now.
        """
        ...


@dataclass(slots=True)
class Sessions:
    """Tokens that browsers have shown, by group, in the memory of this process only. A browser holds a random name."""

    _known: dict[str, tuple[float, dict[str, str]]] = field(default_factory=dict)

    def token(self, session: str | None, group: str) -> str | None:
        """Return the token that this session has shown for `group`."""
        found = self._known.get(session or "")
        if found is None or time.monotonic() - found[0] > SESSION_S:
            return None
        return found[1].get(group)

    def sign_in(self, session: str | None, group: str, token: str) -> str:
        """Note a token; returns the session's name, a new one each time."""
        tokens = self._known.pop(session or "", (0.0, {}))[1]
        while len(self._known) >= _SESSIONS_MAX:
            del self._known[next(iter(self._known))]
        name = secrets.token_urlsafe(32)
        self._known[name] = (time.monotonic(), {**tokens, group: token})
        return name

    def sign_out(self, session: str | None) -> None:
        """Forget a session."""
        self._known.pop(session or "", None)
