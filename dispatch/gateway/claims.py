"""The claim loop: settle what has finished, claim what there is room for, sleep until there is a reason to look.

One call is in flight at a time; what finishes meanwhile rides in the next one, so the busier the gateway, the more
requests share a call. Nothing is polled. The loop goes on when

- a result is ready (it is settled, and the freed slots are claimed for in the same call),
- there is a free slot and a reason to look: the last claim brought all it asked for (there may be more), the server
  said "again", a wake token came, or the longest sleep the server allows is over.

The server marks a gateway as sleeping in the same step that finds nothing for it, and a token waits in its list, so
nothing can slip in between the claim and the sleep.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import structlog

from dispatch.errors import BadArgument, DispatchError, ScriptFault
from dispatch.fabric import functions
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.observing import NOBODY, Observer
from dispatch.fabric.records import Claim, Settled, Settlement
from dispatch.fabric.schema import LIMITS, key
from dispatch.gateway.holdings import Holdings
from dispatch.gateway.identity import Identity
from dispatch.gateway.link import Link
from dispatch.gateway.runs import Runner
from dispatch.gateway.settling import Settler
from dispatch.gateway.waking import TokenListener

log = structlog.get_logger(__name__)

_SHORTEST_SLEEP_S = 0.05
_REFUSALS: tuple[type[DispatchError], ...] = (BadArgument, ScriptFault)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call under way; repeated as it is until answered, also by `settle_rest` after the loop was cancelled."""

    nonce: str
    function: FunctionCall[Any]
    want: int
    items: tuple[Settlement, ...] = ()


class ClaimLoop:
    """Claims and settles for one gateway in one group (its dispatcher)."""

    def __init__(self, identity: Identity, link: Link, runner: Runner, settler: Settler) -> None:
        self.identity = identity
        self._link = link
        self._runner = runner
        self.settler = settler
        self._holdings: Holdings = runner.holdings
        self._changed = runner.holdings.changed
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._call_under_way: _Call | None = None
        self._singly: deque[Settlement] = deque()
        self._look = True
        self._look_at = 0.0
        self._tokens = 0
        self.draining = False
        self.answers: Counter[str] = Counter()
        """How many settles were answered with which word."""
        self.listener = TokenListener(link, key(link.group, "wake"), self._on_token)
        self.observer: Observer = NOBODY
        self.on_generation: Callable[[int], None] = lambda _: None
        self.on_chores: Callable[[int | None, int, float], None] = lambda *_: None
        """Told of every answer: ms until a chore is due, the server's time in ms, when the call was sent (loop's)."""

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Nonces of calls whose answer is not there yet."""
        return () if self._call_under_way is None else (self._call_under_way.nonce,)

    async def run(self) -> None:
        """Claim and settle until drained: then nothing is held and nothing is claimed any more.

        When cancelled, the runs are broken off and `settle_rest` can still settle them.
        """
        async with asyncio.TaskGroup() as runs:
            self._runner.bind(runs)
            try:
                while await self._work_or_sleep():
                    await self._step()
            finally:
                self._runner.bind(None)

    def drain(self) -> None:
        """Claim nothing more, give back what has not begun; `run` ends when the rest has."""
        self.draining = True
        self.listener.close()
        self._runner.stop_unbegun()
        self._changed.set()

    def look(self) -> None:
        """Claim at the next occasion, whatever was heard of work: what is known of sleepers may be gone."""
        self._look = True
        self._changed.set()

    async def settle_rest(self) -> None:
        """Settle everything that is held, whatever it came to, without waiting for it; then claim nothing.

        The closing claim of none tells the server that nobody sleeps here any more, so that it rings for others.
        """
        self.draining = True
        self._runner.settle_all()
        while self._call_under_way is not None or self._to_settle():
            await self._step()
        await self._step()

    def _to_settle(self) -> bool:
        return bool(self._singly) or self._holdings.waiting

    async def _work_or_sleep(self) -> bool:
        """Return when there is something to call for; False when drained."""
        while True:
            free = self._free()
            if self._tokens and not free:
                self.listener.give_back(self._tokens)
                self._tokens = 0
            if self._to_settle() or (free and self._reason_to_look()):
                return True
            if self.draining and not self._holdings:
                return False
            self._changed.clear()
            if free:
                with anyio.CancelScope(deadline=self._look_at):
                    await self._changed.wait()
            else:
                await self._changed.wait()

    def _free(self, settling: int = 0) -> int:
        return 0 if self.draining else self._holdings.free(settling=settling)

    def _reason_to_look(self) -> bool:
        return self._look or self._tokens > 0 or self._loop.time() >= self._look_at

    async def _step(self) -> None:
        """Send one call, wait for its answer (as long as it takes) and act on it."""
        call = self._call_under_way = self._call_under_way or self._next_call()
        try:
            answer = await self._link.insist(call.function, refused=_REFUSALS if call.items else ())
        except _REFUSALS as error:
            self._refused(call, error)
            self._call_under_way = None
            return
        self._call_under_way = None
        value: Claim | Settled = answer.value
        if isinstance(value, Settled):
            for item, word in zip(call.items, value.answers, strict=True):
                held = self._holdings.settled(item, word)
                self.answers[word] += 1
                if held is not None:
                    self.observer.settled(held.lease, item, word, value.claim.server_ms)
            value = value.claim
        self._accept(value, answer.sent_at, call.want)

    def _next_call(self) -> _Call:
        items: tuple[Settlement, ...]
        if self._singly:
            items, want = (self._singly.popleft(),), 0
        else:
            items = tuple(self._holdings.take())
            want = min(self._free(len(items)), LIMITS["claim_max"])
        if want:
            self._tokens, self._look = 0, False
        self._number += 1
        nonce = self.identity.nonce(self._number)
        who = (self.identity.gateway_id, self.identity.dispatcher_id)
        if items:
            return _Call(nonce, functions.lease_settle(*who, nonce=nonce, want=want, items=items), want, items)
        return _Call(nonce, functions.lease_claim(*who, nonce=nonce, want=want), want)

    def _refused(self, call: _Call, error: DispatchError) -> None:
        """The server does not take these results: find the one it is, and put a plain failure in its place."""
        log.error("settle_refused", items=len(call.items), problem=str(error))
        self._look = True
        if len(call.items) > 1:
            self._singly.extend(call.items)
            return
        item = call.items[0]
        if item.error_type != Settler.REFUSED:
            self._singly.append(self.settler.refused(item))
            return
        log.error("result_dropped", request_id=item.request_id)  # its lease runs out, and the caller is told `lost`
        self._holdings.settled(item, "dropped")

    def _accept(self, claim: Claim, sent_at: float, want: int) -> None:
        self.on_generation(claim.generation)
        self.on_chores(claim.chore_ms, claim.server_ms, sent_at)
        if want:
            self.observer.claimed(want, len(claim.leases))
        offset = sent_at - claim.server_ms / 1000
        for lease in claim.leases:
            if self.draining:
                self._runner.settle_unrun(lease, self.settler.released(lease))
            else:
                self._runner.start(lease, offset)
        if want and len(claim.leases) < want and not claim.again:
            # The server counts us as sleeping now: whatever makes work launchable rings.
            self._look_at = self._loop.time() + max(claim.sleep_ms / 1000, _SHORTEST_SLEEP_S)
            self.listener.arm()
        else:
            self._look = True

    def _on_token(self, token: bool) -> None:
        self.observer.woke("work" if token else "reconnect")
        if token:
            self._tokens += 1
        else:
            self._look = True  # the connection was lost, and tokens may have been with it
        self._changed.set()
