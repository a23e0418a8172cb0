"""Errors travel: between tasks as copies, between processes pickled."""

from __future__ import annotations

import copy
import pickle

import pytest

from dispatch import errors
from dispatch.contract import Reply, ReplyHead
from dispatch.errors import DispatchError

REPLY = Reply(request_id="r", pool_id="p", ending="lost", head=ReplyHead(status=502))


def example(kind: type[DispatchError]) -> DispatchError:
    if kind in (errors.RequestEnded, errors.BackendError):
        return kind(REPLY)
    if kind is errors.RequestRefused:
        return errors.RequestRefused("pool_full", pool_id="p", value=3, limit=3, retry_after_ms=1000, message="full")
    if kind is errors.InvalidRequest:
        return errors.InvalidRequest("wrong", param="model", code="invalid_type", status=422)
    if kind is errors.PoolUnknown:
        return errors.PoolUnknown("no such pool", known=("a", "b"))
    return kind("what happened")


def kinds(kind: type[DispatchError] = DispatchError) -> list[type[DispatchError]]:
    below = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return [kind, *(each for child in below for each in kinds(child))]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_a_copy_says_the_same(kind: type[DispatchError]) -> None:
    error = example(kind)
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is kind
        assert str(other) == str(error)
        assert vars(other) == vars(error)
        assert other.__traceback__ is None
