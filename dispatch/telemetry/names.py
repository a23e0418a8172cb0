"""Every name of a span and attribute, and of the GenAI metrics. No other file spells one.

The project's own metrics, each with unit, labels and text, stand in `dispatch.telemetry.metrics.catalogue`.

Names of the GenAI and messaging conventions are those of `open-telemetry/semantic-conventions-genai` and
`open-telemetry/semantic-conventions` (stage "Development": `SCHEMA_URL` pins what they were read from). For waiting and
dispatch there is no convention: those names are the project's own and begin with `llm_dispatch.`.
"""

from __future__ import annotations

from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.37.0"
SCOPE: Final = "fabric-dispatch"
"""Name of the instrumentation scope of all spans and metrics."""

# Span names: what stands in braces is filled in by `str.format`.
SEND_SPAN: Final = "send {pool}"
"""Kind PRODUCER: the submit, until it is admitted or refused."""
PROCESS_SPAN: Final = "process {pool}"
"""Kind CONSUMER: the request from submit to its ending; parent = the producer's span."""
CLIENT_SPAN: Final = "{operation} {model}"
"""Kind CLIENT: one attempt at the endpoint; parent = the dispatch span."""
DELIVER_SPAN: Final = "deliver {pool}"
"""Kind INTERNAL: from the ending to the producer's acknowledgement; parent = the dispatch span."""

# Messaging conventions.
MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGING_DESTINATION_NAME: Final = "messaging.destination.name"
MESSAGING_MESSAGE_ID: Final = "messaging.message.id"
MESSAGING_BODY_SIZE: Final = "messaging.message.body.size"
VALKEY: Final = "valkey"
"""Value of `messaging.system`: the convention has registered none for it."""

# GenAI conventions.
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_USAGE_REASONING_OUTPUT_TOKENS: Final = "gen_ai.usage.reasoning.output_tokens"
OPENAI: Final = "openai"
"""Value of `gen_ai.provider.name`: whatever stands behind an endpoint, it is spoken to as to OpenAI."""
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"

GEN_AI_CLIENT_DURATION: Final = "gen_ai.client.inference.duration"
GEN_AI_CLIENT_TIME_TO_FIRST_CHUNK: Final = "gen_ai.client.inference.time_to_first_chunk"
GEN_AI_CLIENT_INPUT_TOKENS: Final = "gen_ai.client.inference.usage.input_tokens"
GEN_AI_CLIENT_OUTPUT_TOKENS: Final = "gen_ai.client.inference.usage.output_tokens"

# The project's own.
REQUEST_ID: Final = "llm_dispatch.request_id"
PRODUCER_ID: Final = "llm_dispatch.producer_id"
POOL_ID: Final = "llm_dispatch.pool_id"
FABRIC_GROUP_ID: Final = "llm_dispatch.fabric_group_id"
GATEWAY_ID: Final = "llm_dispatch.gateway_id"
DISPATCHER_ID: Final = "llm_dispatch.dispatcher_id"
ENDPOINT_ID: Final = "llm_dispatch.endpoint_id"
BACKEND_ADDRESS: Final = "llm_dispatch.backend_address"
"""Without user, password and query."""
MESSAGE_COUNT: Final = "llm_dispatch.message_count"
COST_UNITS: Final = "llm_dispatch.cost_units"
ATTEMPT: Final = "llm_dispatch.attempt"
QUEUE_WAIT_MS: Final = "llm_dispatch.queue_wait_ms"
EXECUTION_MS: Final = "llm_dispatch.execution_ms"
DELIVERY_MS: Final = "llm_dispatch.delivery_ms"
TOTAL_LATENCY_MS: Final = "llm_dispatch.total_latency_ms"
STATUS: Final = "llm_dispatch.status"
ENDING: Final = "llm_dispatch.ending"
ERROR_KIND: Final = "llm_dispatch.error_type"
ERROR_MESSAGE: Final = "llm_dispatch.error_message"
SKIP_REASON: Final = "llm_dispatch.skip_reason"
"""Why the request's pool did not launch it sooner (a word of the schema's `skips`); absent when nothing held it up."""
OUTCOME: Final = "llm_dispatch.outcome"
"""What the run came to; differs from the ending where that is `reply_dropped`."""
CALLER_REQUEST_ID: Final = "llm_dispatch.caller_request_id"
"""The id that the caller gave in `X-Request-Id`."""
CHUNK_COUNT: Final = "llm_dispatch.chunk_count"
VERDICT: Final = "llm_dispatch.verdict"
"""What the endpoint's breaker made of the attempt."""
LEFT_OUT: Final = "llm_dispatch.left_out"
"""On a span of ending `rejected` that stands for many: how many refusals have no span of their own."""
