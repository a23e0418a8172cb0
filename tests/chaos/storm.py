"""Doing what the plan says, undoing it, and noting what was done when."""

from __future__ import annotations

import heapq
import itertools
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

from tests.chaos.evidence import Trouble
from tests.chaos.plan import CUTS, GATEWAYS, PRODUCERS, Fault
from tests.chaos.processes import GatewayMember
from tests.chaos.world import World, last_lines, say

_TICK_S = 0.05
_PULSE_S, _STALL_S = 0.05, 0.4
_BACK_S = 20.0
_LEFT_S = 90.0
"""How long after the last order the producers may take: the longest timeout, and a slow machine."""

_DRAINED_S = 20.0
_LATE_S = 5.0

_Action = Callable[[], object]
"""False = it could not be done yet."""


class Storm:
    """Runs the plan's faults in the main thread while the producers make their calls."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.troubles: list[Trouble] = []
        self.done: Counter[str] = Counter()
        """Faults by kind and kind of target."""
        self._broken: set[str] = set()
        self._due: list[tuple[float, int, _Action]] = []
        self._number = itertools.count()
        self._over = threading.Event()

    def run(self) -> None:
        """Start the producers and do everything; returns when all of it is undone and every producer is done."""
        pulse = threading.Thread(target=self._feel_pulse, daemon=True)
        pulse.start()
        began = time.time() + 1.0
        self.world.start_producers(began)
        for fault in self.world.plan.faults:
            when = began + fault.at_s
            self._at(when, lambda fault=fault, when=when: self._do(fault, when + _LATE_S))  # type: ignore[misc]  # its own
        deadline = began + self.world.plan.duration_s + _LEFT_S
        told = began
        while (self._due or not self._all_done()) and time.time() < deadline:
            self._work_off()
            self.world.start_again()
            if time.time() - told > 10:
                told = time.time()
                self._tell(told - began)
            time.sleep(_TICK_S)
        while self._due:  # too late for the rest, but nothing may stay broken
            self._work_off()
            time.sleep(_TICK_S)
        self._over.set()
        pulse.join()

    def _work_off(self) -> None:
        while self._due and self._due[0][0] <= time.time():
            heapq.heappop(self._due)[2]()

    def _at(self, when: float, action: _Action) -> None:
        heapq.heappush(self._due, (when, next(self._number), action))

    def _all_done(self) -> bool:
        return all(producer.done for producer in self.world.producers.values())

    def _tell(self, passed_s: float) -> None:
        faults = sum(self.done.values())
        say(f"{passed_s:.0f} of {self.world.plan.duration_s:.0f} s, {faults} faults")

    def _do(self, fault: Fault, until: float) -> None:
        """Do a fault; a little later or not at all when a slow machine is not done with the one before it."""
        since = time.time()
        if fault.target in self._broken:
            if since < until:
                self._at(since + _TICK_S, lambda: self._do(fault, until))
            return
        undo = self._break(fault)
        if undo is None:
            return
        self._broken.add(fault.target)
        family = {"g": "gateway", "p": "producer", "b": "backend"}.get(fault.target[0], fault.target)
        self.done[f"{family} {fault.kind}"] += 1

        def mend() -> None:
            if undo() is False:
                self._at(time.time() + _TICK_S, mend)
                return
            self._broken.discard(fault.target)
            self._back(fault, since)

        self._at(since + fault.for_s, mend)

    def _back(self, fault: Fault, since: float) -> None:
        """Note the trouble; one that a process has to start after is over when it serves again."""
        gateway = self.world.gateways.get(fault.target)
        until = time.time()
        if gateway is not None and gateway.wanted and not gateway.listens and until - since < fault.for_s + _BACK_S:
            self._at(until + _TICK_S, lambda: self._back(fault, since))
            return
        target = fault.target
        self.troubles.append(Trouble(kind=fault.kind, target=target, since=since, until=until))

    def _break(self, fault: Fault) -> _Action | None:
        """Do it; returns what undoes it, None when it could not be done."""
        name = fault.target
        if name == "operator":
            return self._interfere(fault)
        if name == "valkey":
            return self._break_valkey(fault)
        if fault.kind in CUTS:
            return self._break_connections(fault)
        return self._break_backend(fault) if name in self.world.backends else self._break_process(fault)

    def _interfere(self, fault: Fault) -> _Action:
        """Be an operator at work; one that gets no answer tries again."""
        if fault.kind == "cancel":
            return self.world.cancel_some
        self.world.pause(fault.detail, action="pause")
        return lambda: self.world.pause(fault.detail, action="resume")

    def _break_connections(self, fault: Fault) -> _Action:
        proxy = self.world.proxies[fault.target]
        match fault.kind:
            case "cut":
                proxy.cut()
                return _nothing
            case "freeze":
                proxy.freeze()
                return proxy.thaw
            case _:
                proxy.refuse()
                return proxy.allow

    def _break_process(self, fault: Fault) -> _Action | None:
        name = fault.target
        member = self.world.gateways.get(name) or self.world.producers[name]
        if not member.running or (isinstance(member, GatewayMember) and not member.listens):
            return None
        match fault.kind:
            case "kill":
                member.kill()
                return lambda: self._start(name)
            case "drain":
                member.wanted = False
                member.signal(signal.SIGTERM)
                until = time.time() + _DRAINED_S
                return lambda: self._drained(name, until)
            case _:
                member.signal(signal.SIGSTOP)
                return lambda: member.signal(signal.SIGCONT)

    def _break_valkey(self, fault: Fault) -> _Action:
        world, server = self.world, self.world.valkey
        match fault.kind:
            case "kill":
                server.kill()
                return server.start
            case "restart":
                server.stop()
                return server.start
            case "stop":
                server.pause()
                return server.resume
            case "flush":
                world.flush_library()
                return world.load_library
        return self._break_all_connections(fault)

    def _break_all_connections(self, fault: Fault) -> _Action:
        proxies = [self.world.proxies[name] for name in (*GATEWAYS, *PRODUCERS)]
        if fault.kind == "cut":
            for proxy in proxies:
                proxy.cut()
            return _nothing

        def slow_down(delay_s: float) -> None:
            for proxy in proxies:
                proxy.delay_s = delay_s

        slow_down(float(fault.detail))
        return lambda: slow_down(0.0)

    def _break_backend(self, fault: Fault) -> _Action:
        backend = self.world.backends[fault.target]
        if fault.kind == "slow":
            backend.slow_s = float(fault.detail)
            return lambda: setattr(backend, "slow_s", 0.0)
        backend.failing = fault.detail
        return lambda: setattr(backend, "failing", "")

    def _start(self, name: str) -> None:
        if name in self.world.gateways:
            self.world.start_gateway(name)
        else:
            self.world.producers[name].start()

    def _drained(self, name: str, until: float) -> bool:
        """Bring a gateway back that was told to stop; it has to be gone by itself before."""
        gateway = self.world.gateways[name]
        if gateway.running and time.time() < until:
            return False
        code = gateway.ended(0)
        if code != 0:
            self.world.crashes.append(f"{name} ended with {code} when told to stop: {last_lines(gateway.said)}")
            gateway.kill()
        self._start(name)
        return True

    def _feel_pulse(self) -> None:
        """Note when the machine itself had no time: what happens then is nobody's fault."""
        while not self._over.is_set():
            before = time.time()
            time.sleep(_PULSE_S)
            now = time.time()
            if now - before - _PULSE_S > _STALL_S:
                self.troubles.append(Trouble(kind="stall", target="machine", since=before, until=now))


def _nothing() -> None:
    """Undo what undoes itself."""
