"""What travels beside a call is read by `dispatch.producer.call_headers`, which the SDK's transport uses, too."""

from dispatch.producer.call_headers import Headers, call_options, caller_request_id, collect

__all__ = ["Headers", "call_options", "caller_request_id", "collect"]
