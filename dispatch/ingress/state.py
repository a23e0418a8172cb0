"""What the HTTP front needs of the rest of the process, as small protocols, and what it can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dispatch.backend.endpoint import Endpoint
from dispatch.contract import Call, Reply
from dispatch.fabric.connection import Connection
from dispatch.fabric.observing import NOBODY, Observer
from dispatch.gateway.status import GatewayStatus
from dispatch.ingress.authority import Authority
from dispatch.ingress.metrics import MetricsPage
from dispatch.ingress.waits import Waits
from dispatch.producer.detached import Handle
from dispatch.producer.options import CallOptions
from dispatch.producer.streaming import ChunkStream
from dispatch.telemetry.history.store import HistoryStore


class Caller(Protocol):
    """Makes calls through the fabric group; `DispatchClient` is one."""

    async def call(self, call: Call, options: CallOptions) -> Reply:
        """Queue `call` and return its terminal reply, whatever its ending; cancelling cancels the request.

        Raises:
            DispatchError: it was not admitted, or how it ended is not known.
        """
        ...

    def stream_call(self, call: Call, options: CallOptions) -> ChunkStream:
        """Return the chunks of `call`, whose body asks for a stream; it is queued when the first is asked for.

        Raises:
            DispatchError: it cannot be queued.
        """
        ...

    async def submit_call(self, call: Call, options: CallOptions) -> Handle:
        """Queue `call` to be fetched later.

        Raises:
            DispatchError: it was not admitted.
        """
        ...


class Host(Protocol):
    """The gateway this front belongs to; `Gateway` is one."""

    @property
    def max_payload_bytes(self) -> int:
        """Largest body of a call in this group."""
        ...

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        ...

    @property
    def draining(self) -> bool:
        """Whether it is stopping."""
        ...

    def status(self) -> GatewayStatus:
        """Say how it stands now. Asks nobody."""
        ...

    async def check(self, within_s: float) -> str:
        """Ask now whether the fabric group can be used. Returns "" or why not."""
        ...

    async def endpoints(self) -> tuple[Endpoint, ...]:
        """Return the endpoints that this process can call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings:
    """Bounds of the HTTP front.

    `max_held_bytes`: bodies this process holds at once; more are refused, or many large uploads would end the process.
    `admission_ms`: how long Valkey may take to admit a call, so that its absence is told within a second; a body gets
    the time that it takes at `upload_rate` (bytes a second) on top.
    `body_idle_s` and `body_total_s` bound the pauses and the whole of an upload.
    `drain_max_bytes` and `drain_max_s` bound what is read of a body after it was refused, so that a client that still
    sends gets to read why.
    `stream_head_s`: when the head of a stream goes out at the latest, from when its request began to run;
    `stream_keep_alive_s`: how long nothing may be written after it.
    `models_timeout_s` and `ready_timeout_s` bound what is asked for `/v1/models` and `/readyz`,
    `control_timeout_s` each question of the control API; its event streams look at the group every `events_every_s`
    while they do not hear its channel.
    """

    max_held_bytes: int = 1024 * 1024 * 1024
    admission_ms: int = 800
    upload_rate: int = 1024 * 1024
    body_idle_s: float = 20.0
    body_total_s: float = 120.0
    drain_max_bytes: int = 64 * 1024 * 1024
    drain_max_s: float = 30.0
    stream_head_s: float = 15.0
    stream_keep_alive_s: float = 12.0
    models_timeout_s: float = 5.0
    ready_timeout_s: float = 0.5
    control_timeout_s: float = 2.0
    events_every_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressState:
    """Everything the front works with.

    `authority` knows who may do what; without one nobody is asked for a key. `waits` knows how long pools make requests
    wait. `connection` leads to the gateway's group; without one there is no control API. `observer` is told of answers.
    `metrics` writes the page at `/metrics` (None = there is none), which needs no key if `metrics_open`.
    """

    client: Caller
    gateway: Host
    authority: Authority = field(default_factory=Authority)
    waits: Waits = field(default_factory=Waits)
    settings: IngressSettings = field(default_factory=IngressSettings)
    connection: Connection | None = None
    history: HistoryStore | None = None
    observer: Observer = NOBODY
    metrics: MetricsPage | None = None
    metrics_open: bool = False
