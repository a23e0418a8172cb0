"""A simulated OpenAI-compatible engine: the backend of the demo, the tests and the benchmark.

Behaves like a batching engine: slots, a queue, time to the first token and per token, usage numbers, vLLM's metrics.
Text is made up but the same for the same request. Faults are scripted by the body member `simulate` of a call, or from
outside:

    POST /control/faults  {"simulate": {"status": 503, "retry_after": "2"}, "count": 3}
    POST /control/faults  {"simulate": {"cut": "body", "reset": true}, "probability": 0.01}
    GET  /control/stats   calls, running, waiting, disconnects, requests by id, ...
    POST /control/reset   forget rules and numbers

`simulate` itself: see `Behaviour`; a rule: see `Rule`.
"""

from dispatch.backend.simulated.app import SimulatedBackend, create_app
from dispatch.backend.simulated.behaviour import Behaviour, Rule
from dispatch.backend.simulated.options import SimulatorOptions, Spread
from dispatch.backend.simulated.server import running_simulator, serve_simulator

__all__ = [
    "Behaviour",
    "Rule",
    "SimulatedBackend",
    "SimulatorOptions",
    "Spread",
    "create_app",
    "running_simulator",
    "serve_simulator",
]
