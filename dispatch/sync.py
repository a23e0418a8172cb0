"""The blocking client: `from dispatch.sync import DispatchClient`."""

from dispatch.producer.sync import DispatchClient

__all__ = ["DispatchClient"]
