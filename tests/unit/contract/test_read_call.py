"""`read_call`: what it reads, what it refuses and how it says so, what it leaves alone."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.contract import Call, Operation, read_call
from dispatch.contract.call import MEMBERS_MAX, MODEL_MAX_LENGTH
from dispatch.contract.parts import VALUES_MAX
from dispatch.errors import InvalidRequest

CHAT = Operation.CHAT_COMPLETIONS
GOOD = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


def chat(more: bytes = b"", *, messages: bytes = b"[]") -> bytes:
    return b'{"model":"m","messages":' + messages + more + b"}"


def refusal(body: bytes, operation: Operation = CHAT) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_call(operation, body)
    assert caught.value.status == 400
    return caught.value


def images(content: Any, operation: Operation = CHAT) -> int:
    body = {"model": "m", operation.main_member: content}
    return read_call(operation, json.dumps(body).encode()).image_count


def test_it_reads_the_few_facts_and_keeps_the_very_bytes() -> None:
    body = b' {"stream":false,"messages":[{},{},{}],"x":{"model":"no"},"model":"m\\u00e9"}\r\n'
    call = read_call(CHAT, body)
    assert call == Call(operation=CHAT, body=body, model="mé", stream=False, message_count=3, image_count=0)
    assert call.body is body


@pytest.mark.parametrize(
    ("operation", "member"),
    [
        (Operation.COMPLETIONS, b'"prompt":"x"'),
        (Operation.COMPLETIONS, b'"prompt":[1,2]'),
        (Operation.COMPLETIONS, b'"prompt":null'),
        (Operation.EMBEDDINGS, b'"input":"x"'),
        (Operation.EMBEDDINGS, b'"input":[[1],[2]]'),
        (Operation.RESPONSES, b'"input":"x"'),
        (Operation.RESPONSES, b'"input":[{"role":"user","content":"x"}]'),
    ],
)
def test_each_operation_has_its_main_member(operation: Operation, member: bytes) -> None:
    call = read_call(operation, b'{"model":"m",' + member + b"}")
    assert call.message_count is None
    assert refusal(b'{"model":"m"}', operation).param == operation.main_member
    assert refusal(b"{" + member + b"}", operation).param == "model"
    both = refusal(b"{}", operation)
    assert both.param is None
    assert operation.main_member in both.message


@pytest.mark.parametrize(("value", "stream"), [(b"true", True), (b"false", False), (b"null", False)])
def test_stream_is_a_boolean_or_null(value: bytes, stream: bool) -> None:
    assert read_call(CHAT, chat(b',"stream":' + value)).stream is stream


@pytest.mark.parametrize("value", [b'"true"', b"1", b"0", b"[]", b"{}", b'""', b"1e999"])
def test_another_stream_is_refused(value: bytes) -> None:
    assert refusal(chat(b',"stream":' + value)).param == "stream"


@pytest.mark.parametrize(
    "value", [b"null", b"7", b'""', b'" \\t"', b"[]", b'{"a":1}', b"true", b'"\\ud800"', b'"' + b"m" * 513 + b'"']
)
def test_a_model_that_names_nothing_is_refused(value: bytes) -> None:
    assert refusal(b'{"messages":[],"model":' + value + b"}").param == "model"


def test_a_model_may_be_as_long_as_the_bound_in_characters() -> None:
    name = "模" * MODEL_MAX_LENGTH
    assert read_call(CHAT, json.dumps({"model": name, "messages": []}).encode()).model == name


@pytest.mark.parametrize("value", [b"null", b'"x"', b"{}", b"7", b"true"])
def test_messages_must_be_an_array(value: bytes) -> None:
    error = refusal(chat(messages=value))
    assert (error.param, error.code) == ("messages", "invalid_type")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b" \r\n\t ", "empty"),
        (b"hello", "not JSON"),
        (GOOD[:-1], "truncated"),
        (GOOD[:-1] + b",}", "trailing comma"),
        (GOOD + b"x", "trailing"),
        (GOOD + GOOD, "trailing"),
        (GOOD + b"\x00", "trailing"),
        (b"\xef\xbb\xbf" + GOOD, "byte order mark"),
        (GOOD.decode().encode("utf-16"), "byte order mark"),
        (GOOD.decode().encode("utf-16-le"), "not JSON"),
        (b"[" + GOOD + b"]", "must be a JSON object"),
        (b"7", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"' + b"x" * 40 + b'"', "must be a JSON object"),
        (chat(b',"x":NaN'), "NaN"),
        (chat(b',"x":-Infinity'), "Infinity"),
        (chat(b',"x":[1,Infinity]'), "Infinity"),
        (chat(b',"x":01'), "not JSON"),
        (chat(b',"x":"a\nb"'), "not JSON"),
        (chat(b',"x":"\\q"'), "not JSON"),
        (chat(b',"x":"\\u12G4"'), "not JSON"),
        (chat(b",'x':1"), "not JSON"),
        (chat(b"/* no */"), "not JSON"),
    ],
)
def test_what_is_no_json_is_refused_in_a_sentence(body: bytes, says: str) -> None:
    error = refusal(body)
    assert says in error.message
    assert error.param is None


@pytest.mark.parametrize("bad", [b"\xff", b"\xc0\xaf", b"\xe9", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82"])
@pytest.mark.parametrize("before", [0, 262_143, 262_144, 600_000])
def test_bytes_that_are_no_utf8_are_refused_wherever_they_stand(bad: bytes, before: int) -> None:
    prefix = b'{"model":"m","messages":[],"x":"'
    error = refusal(prefix + b"a" * before + bad + b'"}')
    assert error.code == "invalid_utf8"
    assert f"byte {len(prefix) + before}" in error.message


@pytest.mark.parametrize("shift", range(4))
def test_characters_are_not_cut_where_a_large_body_is_checked_in_pieces(shift: int) -> None:
    text = "a" * shift + "é漢🙂" * 100_000
    assert read_call(CHAT, json.dumps({"model": "m", "messages": [], "x": text}, ensure_ascii=False).encode())


@pytest.mark.parametrize(
    "text",
    [
        b"\\ud800",
        b"\\udfff",
        b"a\\ud83d b",
        b"\\ud800\\ud800",
        b"\\udc00\\ud800",
        b"\\ud83d\\ude00\\ude00",
        b"\\\\\\ud800",
        b"\\\\ud83d\\ude00",
        b"\\uD800\\n",
    ],
)
def test_half_of_a_surrogate_pair_in_content_is_not_ours_to_judge(text: bytes) -> None:
    body = chat(messages=b'[{"content":"' + text + b'"},{"content":[{"type":"image_url"}]}]', more=b',"y":1')
    assert body.decode()
    call = read_call(CHAT, body)
    assert (call.body, call.message_count, call.image_count) == (body, 2, 1)


def test_a_body_with_half_a_pair_is_checked_like_any_other() -> None:
    assert refusal(b'{"model":"m","x":"\\ud800","messages":[}').code == "invalid_json"
    assert refusal(b'{"model":"a","x":"\\ud800","model":"b","messages":[]}').code == "duplicate_member"
    assert read_call(CHAT, b'{"model":"a\\\\b","x":"\\ud800","messages":[]}').model == "a\\b"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b","messages":[]}',
        b'{"model":"a","messages":[],"mod\\u0065l":"a"}',
        b'{"model":"a","messages":[],"stream":false,"stream":true}',
        b'{"messages":[],"model":"a","messages":[]}',
        b'{"\\u006d\\u006f\\u0064\\u0065\\u006c":"a","model":"b","messages":[]}',
    ],
)
def test_a_member_that_is_read_may_not_stand_twice(body: bytes) -> None:
    error = refusal(body)
    assert (error.code, error.param) == ("duplicate_member", None)


@pytest.mark.parametrize(
    "more",
    [
        b',"seed":123456789012345678901234567890,"top_p":0.10000000000000001,"x":[1e400,-0.0,1E-400]',
        b',"n":' + b"9" * 5000,
        b',"temperature":1,"temperature":2',
        b',"x":{"model":1,"model":2,"stream":"a","stream":[]}',
        b',"Model":"b","STREAM":"yes"',
        b',"prompt":7,"input":{}',
        b',"":0',
        b',"metadata":{"image_count":9}',
    ],
)
def test_what_is_not_read_is_not_judged(more: bytes) -> None:
    assert read_call(CHAT, chat(more)) == Call(operation=CHAT, body=chat(more), model="m", message_count=0)


def test_messages_that_are_no_objects_are_counted_and_left_to_the_endpoint() -> None:
    part = b'{"content":[{"type":"image_url"},7,null,["image_url"]]}'
    call = read_call(CHAT, chat(messages=b'[null,"x",[],7,' + part + b"]"))
    assert (call.message_count, call.image_count) == (5, 1)


def test_image_parts_are_counted_by_their_type_in_either_form() -> None:
    url, inline = {"type": "image_url", "image_url": "https://x"}, {"type": "image_url", "image_url": {"url": "data:"}}
    assert images([{"role": "user", "content": [url, inline, {"type": "text", "text": "image_url"}]}]) == 2
    assert images([{"role": "tool", "content": [inline]}, {"role": "user", "content": [inline]}]) == 2
    assert images([{"role": "user", "content": '[{"type":"image_url"}]'}, {"role": "user", "content": None}]) == 0
    assert images([{"role": "user", "content": [{"type": "input_image", "image_url": "https://x"}]}]) == 1
    assert images([{"role": "user", "content": [{"type": ["image_url"]}, {"type": "x" * 200}, {}]}]) == 0


def test_a_type_spelled_with_escapes_is_the_same_type() -> None:
    body = chat(messages=b'[{"content":[{"t\\u0079pe":"image\\u005furl"},{"type":"\\u0069nput_image"}]}]')
    assert read_call(CHAT, body).image_count == 2


def test_images_of_a_response_stand_in_items_their_content_and_tool_outputs() -> None:
    image = {"type": "input_image", "image_url": "https://x"}
    items = [
        {"role": "user", "content": [image, {"type": "input_text", "text": "x"}]},
        {"type": "function_call_output", "output": [image]},
        image,
    ]
    assert images(items, Operation.RESPONSES) == 3
    assert images("input_image", Operation.RESPONSES) == 0
    assert images(["input_image"], Operation.EMBEDDINGS) == 0


@pytest.mark.parametrize("depth", [2_000, 5_000, 200_000])
@pytest.mark.parametrize(("opened", "closed"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting_is_refused_at_once(opened: bytes, closed: bytes, depth: int) -> None:
    nest = opened * depth + b"1" + closed * depth
    started = time.perf_counter()
    assert refusal(chat(b',"x":' + nest)).code == "nested_too_deep"
    assert refusal(chat(messages=b"[" + nest + b"]")).code == "nested_too_deep"
    assert time.perf_counter() - started < 1


def test_usual_nesting_passes() -> None:
    assert read_call(CHAT, chat(b',"x":' + b'{"a":[' * 200 + b"]}" * 200))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{" + b'"a":1,' * MEMBERS_MAX + b'"b":1}', "too_many_members"),
        (chat(messages=b"[" + b"{}," * (VALUES_MAX + 1) + b"{}]"), "too_many_values"),
        (chat(messages=b'[{"content":[' + b"1," * (VALUES_MAX + 1) + b"1]}]"), "too_many_values"),
    ],
)
def test_bodies_made_of_nothing_but_structure_cost_a_bounded_time(body: bytes, code: str) -> None:
    body += b" " * (4_000_000 - len(body))
    started = time.perf_counter()
    assert refusal(body).code == code
    assert time.perf_counter() - started < 1


def test_commas_in_text_are_no_values() -> None:
    text = b'a, \\"b\\", \\\\' * VALUES_MAX
    call = read_call(CHAT, chat(messages=b'[{"content":"' + text + b'"},{}]'))
    assert call.message_count == 2


def test_commas_up_to_the_bound_are_counted_exactly() -> None:
    assert read_call(CHAT, b'{"messages":[' + b"{}," * VALUES_MAX + b'{}],"model":"m"}').message_count == VALUES_MAX + 1


# An independent reader: the standard library, strict, all members of an object kept.


class _Whole(str):
    """A whole number of any length, as it was written."""

    __slots__ = ()


def strictly(body: bytes) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    return json.loads(
        body.decode("utf-8"), object_pairs_hook=lambda pairs: ("object", pairs), parse_constant=refuse, parse_int=_Whole
    )


def acceptable(body: bytes) -> bool:
    try:
        document = strictly(body)
    except ValueError:
        return False
    if not isinstance(document, tuple):
        return False
    read = [(name, value) for name, value in document[1] if name in ("model", "stream", "messages")]
    members = dict(read)
    model, stream = members.get("model"), members.get("stream")
    return (
        len(read) == len(members)
        and isinstance(members.get("messages"), list)
        and (stream is None or isinstance(stream, bool))
        and isinstance(model, str)
        and not isinstance(model, _Whole)
        and bool(model.strip())
        and not any(0xD800 <= ord(character) <= 0xDFFF or character == "\ufffd" for character in model)
    )


SEEDS = [
    GOOD,
    b'{"model":"qwen","stream":true,"messages":[{"role":"user","content":[{"type":"image_url"}]}],"n":[1,2.5e3,-0.0]}',
    '{"messages":[{"content":"é漢🙂 \\ud83d\\ude00 \\ud800 \\n"}],"model":"m\\u0041","x":{"model":1,"a":[]}}'.encode(),
]
PIECES = st.one_of(
    st.binary(max_size=3),
    st.sampled_from(
        [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"NaN", b"\\ud83d", b"\\u00e9", b"\\", b" ", b"0"]
    ),
    st.sampled_from(
        [b'"model":"x",', b'"stream":null,', b'"messages":[],', b'"mod\\u0065l":"y",', b"1e999", b"-", b"."]
    ),
)


@pytest.mark.parametrize("broken", [b"\\\x00", b"\x00", b"\\\\\x00", b"\\\x01"])
def test_a_control_character_is_refused_also_beside_half_a_surrogate_pair(broken: bytes) -> None:
    refusal(b'{"model":"m","messages":[],"x":"\\ud800 ' + broken + b'"}')


@settings(max_examples=600, deadline=None)
@given(
    seed=st.sampled_from(SEEDS),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4), PIECES), min_size=1, max_size=3),
)
def test_damaged_bodies_are_taken_exactly_when_a_strict_reader_takes_them(
    seed: bytes, cuts: list[tuple[float, int, bytes]]
) -> None:
    body = seed
    for where, gone, piece in cuts:
        at = int(where * len(body))
        body = body[:at] + piece + body[at + gone :]
    if not acceptable(body):
        refusal(body)
        return
    call = read_call(CHAT, body)
    document = dict(strictly(body)[1])
    assert call.body == body
    assert (call.model, call.message_count) == (document["model"], len(document["messages"]))
    assert call.stream is bool(document.get("stream"))
