"""Settings of a gateway process, and config documents of a group as files."""

from dispatch.config.documents import default_document, encode_document, load_document
from dispatch.config.edits import edited
from dispatch.config.settings import GatewaySettings

__all__ = ["GatewaySettings", "default_document", "edited", "encode_document", "load_document"]
