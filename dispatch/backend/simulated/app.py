"""The simulated backend as an ASGI application."""

from __future__ import annotations

import hmac
import time
from typing import Any

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dispatch.backend.simulated.behaviour import Rule, Rules
from dispatch.backend.simulated.calls import CallRefused, SimulatedCall, read_simulated_call
from dispatch.backend.simulated.engine import Engine
from dispatch.backend.simulated.exchange import Exchange, error_body
from dispatch.backend.simulated.generation import Service
from dispatch.backend.simulated.metrics import CONTENT_TYPE, EngineMetrics
from dispatch.backend.simulated.options import SimulatorOptions
from dispatch.contract import Operation

PREFIX = "/v1"


class Simulator:
    """The state behind one application: engine, rules and counters."""

    def __init__(self, options: SimulatorOptions) -> None:
        self.options = options
        self.engine = Engine(options)
        self.rules = Rules(options.seed)
        self.metrics = EngineMetrics(self.engine, options.models[0])
        self.service = Service(self.engine, self.metrics)

    def admit(self, exchange: Exchange, operation: Operation, body: bytes) -> SimulatedCall:
        """Read a call and settle how it behaves.

        Raises:
            CallRefused: wrong key, unreadable body, or a model that is not served.
        """
        self.check_key(exchange.header(b"authorization"))
        call = read_simulated_call(operation, body, exchange.header(b"x-request-id").decode("latin-1"))
        self.engine.stats.note_call(call)
        if self.options.strict_models and call.model not in self.options.models:
            raise CallRefused(
                404, f"the model {call.model[:80]!r} does not exist", param="model", code="model_not_found"
            )
        behaviour = self.rules.behaviour_of(operation, call.model, call.behaviour)
        return call if behaviour is call.behaviour else msgspec.structs.replace(call, behaviour=behaviour)

    def check_key(self, authorization: bytes) -> None:
        """Refuse a wrong key, where one is asked for.

        Raises:
            CallRefused: 401.
        """
        key = self.options.api_key
        if key and not hmac.compare_digest(authorization, b"Bearer " + key.encode()):
            raise CallRefused(401, "the API key is missing or wrong", code="invalid_api_key")


class _Generate:
    """One operation's route, as a plain ASGI application: the hot path."""

    def __init__(self, simulator: Simulator, operation: Operation) -> None:
        self._simulator = simulator
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        simulator = self._simulator
        exchange = Exchange(scope, receive, send)
        body = await exchange.body()
        if body is None:
            simulator.engine.stats.disconnects += 1
            return
        try:
            call = simulator.admit(exchange, self._operation, body)
            if simulator.options.instant and call.is_plain:
                await simulator.service.answer_at_once(exchange, call)
            else:
                await self._answer_watched(exchange, call)
        except CallRefused as error:
            simulator.engine.stats.refused += 1
            await exchange.refuse(error, headers=[(b"retry-after", b"1")] if error.status == 503 else ())

    async def _answer_watched(self, exchange: Exchange, call: SimulatedCall) -> None:
        """Answer, and stop at once when the client leaves: its slot is for somebody else then."""
        refusal: CallRefused | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, exchange, tasks.cancel_scope)
            try:
                await self._simulator.service.answer(exchange, call)
            except CallRefused as error:
                refusal = error
            tasks.cancel_scope.cancel()
        if refusal is not None:
            raise refusal

    async def _watch(self, exchange: Exchange, answering: anyio.CancelScope) -> None:
        await exchange.disconnected()
        if not exchange.dropped:
            self._simulator.engine.stats.disconnects += 1
            answering.cancel()


class SimulatedBackend(Starlette):
    """The application; `simulator` is its state."""

    def __init__(self, options: SimulatorOptions) -> None:
        self.simulator = Simulator(options)
        self._hot = {f"{PREFIX}/{operation.path}": _Generate(self.simulator, operation) for operation in Operation}
        control = _Control(self.simulator)
        super().__init__(
            routes=[
                *(Route(path, endpoint, methods=["POST"]) for path, endpoint in self._hot.items()),
                Route(f"{PREFIX}/models", control.models, methods=["GET"]),
                Route(f"{PREFIX}/models/{{model:path}}", control.model, methods=["GET"]),
                Route("/health", control.health, methods=["GET"]),
                Route("/metrics", control.page_of_metrics, methods=["GET"]),
                Route("/control/faults", control.add_rule, methods=["POST"]),
                Route("/control/faults", control.list_rules, methods=["GET"]),
                Route("/control/stats", control.stats, methods=["GET"]),
                Route("/control/reset", control.reset, methods=["POST"]),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; calls go past the routing table and its middleware, which cost as much as the rest of them."""
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._hot.get(scope["path"])
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def create_app(options: SimulatorOptions | None = None) -> SimulatedBackend:
    """Make the application of a simulated OpenAI-compatible backend.

    Scripted disconnects need the server of `running_simulator` or `dispatch simulate`; elsewhere they end the answer.
    """
    return SimulatedBackend(options or SimulatorOptions())


class _Control:
    """Everything but generations: models, metrics, and the control endpoints."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        return _json({"object": "list", "data": [self._model(name) for name in self._simulator.options.models]})

    async def model(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        name = request.path_params["model"]
        if self._simulator.options.strict_models and name not in self._simulator.options.models:
            return _error(CallRefused(404, "the model does not exist", param="model", code="model_not_found"))
        return _json(self._model(name))

    async def health(self, _request: Request) -> Response:
        return Response()

    async def page_of_metrics(self, _request: Request) -> Response:
        return Response(self._simulator.metrics.text(), media_type=CONTENT_TYPE)

    async def add_rule(self, request: Request) -> Response:
        try:
            rule = msgspec.json.decode(await request.body(), type=Rule)
        except (msgspec.MsgspecError, RecursionError) as error:
            return _error(CallRefused(400, f"not a rule: {error}"))
        if not 0 <= rule.probability <= 1 or (rule.count is not None and rule.count < 1):
            return _error(CallRefused(400, "probability must be 0 to 1, count at least 1"))
        self._simulator.rules.add(rule)
        return await self.list_rules(request)

    async def list_rules(self, _request: Request) -> Response:
        return _json({"rules": self._simulator.rules.active})

    async def stats(self, _request: Request) -> Response:
        engine = self._simulator.engine
        return _json({"running": engine.running, "waiting": engine.waiting, **msgspec.structs.asdict(engine.stats)})

    async def reset(self, request: Request) -> Response:
        self._simulator.rules.clear()
        self._simulator.engine.reset_stats()
        return await self.stats(request)

    def _refused(self, request: Request) -> Response | None:
        try:
            self._simulator.check_key(request.headers.get("authorization", "").encode("latin-1"))
        except CallRefused as error:
            return _error(error)
        return None

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "simulated"}


def _json(document: Any) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


def _error(error: CallRefused) -> Response:
    return Response(error_body(error), status_code=error.status, media_type="application/json")
