"""Every event that is logged, and what it says.

Each line also has `level`, `logger`, `timestamp` and, of a gateway process, `gateway` and `group`; what happens while a
request runs has its `request_id` and `pool`.
`left_out`: so many of its kind were not logged since the last line of that kind.
"""

from __future__ import annotations

from typing import Final

EVENTS: Final[dict[str, str]] = {
    # A gateway's life.
    "gateway_started": "it is registered and claims",
    "gateway_draining": "it claims nothing more; in_flight requests have timeout_s to end",
    "gateway_stopped": "it has ended",
    "gateway_failed": "it has ended by a fault of ours, see trace",
    "gateway_disabled": "queueing is off, nothing was started",
    "gateway_id_seen": "another process has the same gateway id, or had it until a moment ago",
    "leases_left_behind": "the time to stop was over before count leases were settled; they run out",
    "listening": "HTTP is served at url; keys says whether callers are asked for one",
    "signal_received": "it was told to stop",
    "no_key_is_asked_for": "other machines can connect and no key is asked for, as the settings say",
    # The fabric group.
    "fabric_usable": "Valkey answers again after away_s",
    "fabric_unusable": "Valkey does not answer, or not as it should; problem says what",
    "call_not_answered": "a call had no answer and is made again",
    "heartbeat_failed": "a heartbeat had no answer and is sent again",
    "last_heartbeat_failed": "the one that says goodbye had none",
    "reaping_failed": "a round of ending what time ends had no answer",
    "tokens_not_given_back": "wake tokens are lost; whoever sleeps wakes by itself a little later",
    "group_config_read": "the config of generation is in force here",
    "group_configured_by_default": "the group had no config and got the default one",
    "group_configured_by_another": "somebody else configured it first",
    "endpoint_url_unused": "the group has a config, so the setting for a first one does nothing",
    "metrics_exported_again": "it does again",
    "metrics_not_exported": "the collector does not take metrics",
    "metrics_without_group": "a scrape could not read the group's state",
    # Requests.
    "attempt_settled": "what an attempt came to (outcome) and what the server made of it (answer)",
    "attempt_given_out_again": "the server had lost that it gave the attempt out; it is not run twice",
    "lease_given_out_again": "the same while it runs: it goes on",
    "lease_not_renewed": "a lease ended before its renewal was confirmed; the run is broken off",
    "unknown_lease": "the server holds a lease for us that we had not heard of; run says whether it is run now",
    "run_failed": "a fault of ours ended one request, see trace",
    "settle_refused": "the server does not take these results; they are sent one by one",
    "result_dropped": "nor a plain failure in the place of one: its caller is told lost",
    "reply_body_not_stored": "the server had no room for a large reply; it travels with the settle",
    "chunks_refused": "the server does not take these chunks; their streams end",
    # Endpoints.
    "endpoint_call_failed": "the network or the backend failed",
    "endpoint_unusable": "the config's endpoint cannot be called from this process",
    "endpoint_probed": "a breaker's probe, and what it says",
    "breaker_moved": "as a scrape of the metrics saw it",
    "probe_over": "a probe had no answer in its time",
    "gate_unusable": "the config's gate cannot be asked from this process",
    "gate_without_sample": "the engine's metrics do not say what the gate goes by",
    "gate_sampled_again": "they do again",
    "chore_not_taken": "asking for a probe or sample to take had no answer",
    "chore_failed": "a fault of ours ended one, see trace",
    "snapshot_not_published": "looking for those who watch the group had no answer",
    # HTTP.
    "call_refused": "a call got no place, with the word of x-dispatch-reason",
    "call_failed": "a fault of ours ended a call, see trace",
    "caller_gone": "a client closed its connection before its call was queued, or while it waited",
    "stream_failed": "a fault of ours ended a stream, see trace",
    "request_failed": "a fault of ours ended another request",
    "control_request_failed": "a fault of ours ended a request of the control API, see trace",
    "control_answer_unfit": "the server's answer has not the form that the control API promises",
    "key_refused": "a key that is none; key_id where the id is known",
    "key_unreadable": "the record of a key is damaged; it lets nobody in",
    # Producers: the SDK, and the client inside a gateway.
    "background_work_failed": "something that nobody waits for",
    "liveness_interrupted": "signs of life do not get through",
    "liveness_restored": "they do again",
    "overdue_not_ended": "what is past its deadline could not be ended now",
    "producer_broken": "a fault of ours ended the client",
    "producer_taken_over": "another process has the same producer id; this one is silent from now on",
    "replies_not_read": "as it closed, the last replies could not be read",
    "reply_body_left_to_expire": "a large reply was read and could not be removed",
    "reply_frame_refused": "a reply was not for this client",
    "reply_frame_unreadable": "a reply is damaged",
    "reply_pump_interrupted": "replies cannot be read",
    "reply_pump_restored": "they can again",
    "request_not_cancelled": "nobody waits for it any more, and the group was not told",
    "requests_not_cancelled": "the same for all of a client that closed",
    "requests_not_looked_after": "as it closed, it could not be said whether requests had ended",
    "stream_given_up": "nobody reads a stream any more",
    # Recorders: history and traces.
    "records_lost": "records were trimmed before they were recorded",
    "records_not_read": "the streams of records cannot be read",
    "records_read_again": "they can again",
    "records_taken_over": "records that a dead process had read and not recorded",
    "record_unreadable": "a record is none of this version's",
    "recorder_failed": "a fault of ours ended the recording to one sink, see trace",
    "sink_away": "a database or collector does not take spans",
    "sink_back": "it does again",
    "spans_dropped": "a batch was offered for long enough and is given up",
    # Studio.
    "act_refused": "who may only look asked for a change",
    "sign_in_refused": "a key that does not let anybody in",
    # `dispatch dev`.
    "demo_load_interrupted": "the demo's load waits for the group",
    "demo_request_ended": "one of its requests did not succeed",
}
"""By name. A test holds this list and the code together."""
