"""The contract between producers, gateways and endpoints: what a request and a reply are.

The direct path and the queued path use these same records, so they cannot drift into two APIs.
"""

from dispatch.contract.call import Call, read_call
from dispatch.contract.chunk import Chunk
from dispatch.contract.envelope import CONTRACT_VERSION, Operation, RequestEnvelope, Scalar
from dispatch.contract.names import check_name
from dispatch.contract.reply import Attempt, Reply, ReplyError, ReplyHead, Usage

__all__ = [
    "CONTRACT_VERSION",
    "Attempt",
    "Call",
    "Chunk",
    "Operation",
    "Reply",
    "ReplyError",
    "ReplyHead",
    "RequestEnvelope",
    "Scalar",
    "Usage",
    "check_name",
    "read_call",
]
