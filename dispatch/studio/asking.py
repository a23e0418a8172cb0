"""What a page may ask Studio for, beside what it is told: one table of questions, each with who may ask.

A question comes over the page's own socket, so it is bound to the session the page was made for; a link alone asks
nothing. Answers hold names, sizes and times, never content.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from dispatch.errors import DispatchError, NotAllowed
from dispatch.studio.reader import Reader
from dispatch.studio.visitors import Visitor
from dispatch.telemetry.history.queries import History

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, by whom, and of which group's reader. `history` None = it is off."""

    reader: Reader
    visitor: Visitor
    args: Mapping[str, Any]
    history: History | None = None

    def text(self, name: str, most: int = 200) -> str:
        """Return an argument that is text.

        Raises:
            DispatchError: it is none, or too long.
        """
        value = self.args.get(name, "")
        if not isinstance(value, str) or len(value) > most:
            raise DispatchError(f"{name} has to be text of at most {most} characters")
        return value.strip()

    def number(self, name: str) -> int:
        """Return an argument that is a whole number.

        Raises:
            DispatchError: it is none.
        """
        value = self.args.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise DispatchError(f"{name} has to be a whole number")
        return value

    async def run(self, call: Any) -> Any:
        """Run one function for the group.

        Raises:
            DispatchError: what the server says.
        """
        return await self.reader.require().run(self.reader.group, call)


Handler = Callable[[Question], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Counter:
    """Where questions are answered: `looks` by whoever may look, `acts` by whoever may change things."""

    looks: Mapping[str, Handler]
    acts: Mapping[str, Handler]

    async def answer(self, what: str, question: Question) -> dict[str, Any]:
        """Return `{"ok": True, "result": ...}`, or False with a sentence. Never raises what the server says."""
        try:
            handler = self.looks.get(what) or self._act(what, question)
            return {"ok": True, "result": await handler(question)}
        except DispatchError as error:
            return {"ok": False, "result": {"message": str(error), "kind": type(error).__name__}}

    def _act(self, what: str, question: Question) -> Handler:
        handler = self.acts.get(what)
        if handler is None:
            raise DispatchError(f"{what!r} is nothing that can be asked")
        if not question.visitor.writes:
            log.warning("act_refused", act=what, actor=question.visitor.actor, group=question.reader.group)
            raise NotAllowed(question.visitor.why, code="role_not_allowed")
        return handler
