"""`GET /v1/models`: what the group's endpoints serve, in one list."""

from __future__ import annotations

from http import HTTPStatus

import anyio
import msgspec

from dispatch.backend import Endpoint, EndpointClient, Execution
from dispatch.contract.answers import JSON, Answer, Meaning, Problem, answer_of_problem
from dispatch.ingress.state import Host

_NONE_CONFIGURED = Meaning(HTTPStatus.SERVICE_UNAVAILABLE, "rejected-no_endpoint", retry=True)
_NONE_ANSWERED = Meaning(HTTPStatus.BAD_GATEWAY, "ended-failed", retry=True)


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


class _Model(msgspec.Struct):
    id: str


_LIST = msgspec.json.Decoder(_List)
_MODEL = msgspec.json.Decoder(_Model)


class ModelList:
    """Asks each endpoint for its models. Keeps connections, so it has to be closed."""

    def __init__(self, gateway: Host, timeout_s: float) -> None:
        self._gateway = gateway
        self._timeout_s = timeout_s
        self._client = EndpointClient()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def answer(self) -> Answer:
        """Ask all endpoints at once; those that do not answer with a list are left out, unless none does."""
        endpoints = await self._endpoints()
        if not endpoints:
            message = "no endpoint can be called: none is configured, or their keys cannot be read by this gateway"
            return answer_of_problem(Problem(meaning=_NONE_CONFIGURED, message=message, code="no_endpoint"))
        executions = await self._ask(endpoints)
        lists = [models for execution in executions if (models := _models(execution)) is not None]
        if not lists:
            reasons = "; ".join(_why(execution) for execution in executions)
            message = f"no endpoint answered with a list of models: {reasons}"
            return answer_of_problem(Problem(meaning=_NONE_ANSWERED, message=message, code="no_endpoint_answered"))
        found: dict[str, msgspec.Raw] = {}
        for models in lists:
            for name, model in models.items():
                found.setdefault(name, model)
        body = msgspec.json.encode({"object": "list", "data": list(found.values())})
        return Answer(HTTPStatus.OK, [("content-type", JSON)], body)

    async def _endpoints(self) -> list[Endpoint]:
        """Return one endpoint for each address: pools may name the same one several times."""
        distinct = {(endpoint.url, endpoint.authorization): endpoint for endpoint in await self._gateway.endpoints()}
        return list(distinct.values())

    async def _ask(self, endpoints: list[Endpoint]) -> list[Execution]:
        answers: dict[int, Execution] = {}

        async def ask(at: int, endpoint: Endpoint) -> None:
            answers[at] = await self._client.models(endpoint, deadline_s=self._timeout_s)

        async with anyio.create_task_group() as tasks:
            for at, endpoint in enumerate(endpoints):
                tasks.start_soon(ask, at, endpoint)
        return [answers[at] for at in range(len(endpoints))]


def _models(execution: Execution) -> dict[str, msgspec.Raw] | None:
    """Return the models of an answer by id, as they were written; None if it is no list of models."""
    if execution.outcome != "succeeded":
        return None
    found: dict[str, msgspec.Raw] = {}
    try:
        for model in _LIST.decode(execution.body).data:
            found.setdefault(_MODEL.decode(model).id, model)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return found


def _why(execution: Execution) -> str:
    error = execution.head.error
    return error.message if error is not None else f"endpoint {execution.head.endpoint_id!r} sent no list of models"
