"""Encode and decode are inverses, and whatever else arrives is a BadRequest."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from pdactors.client_messages import (
    ClientRequest,
    DoneEvent,
    ErrorEvent,
    Event,
    RequestBody,
    ToClient,
    ToGateway,
    TokenEvent,
    encode_line,
    to_client_decoder,
    to_gateway_decoder,
)
from pdactors.errors import BadRequest
from pdactors.messages import (
    Control,
    Generate,
    Heartbeat,
    Message,
    Sampling,
    control_decoder,
    decode,
    encode,
    explain,
)
from pdactors.token_ids import TokenIds, to_wire

DECODERS: dict[str, tuple[msgspec.msgpack.Decoder[Any], tuple[type[Message], ...]]] = {
    "control": (control_decoder, get_args(Control)),
    "to gateway": (to_gateway_decoder, get_args(ToGateway)),
    "to client": (to_client_decoder, get_args(ToClient)),
}
KINDS = [(decoder, kind) for decoder, kinds in DECODERS.values() for kind in kinds]
every_kind = pytest.mark.parametrize(("decoder", "kind"), KINDS, ids=[kind.__name__ for _, kind in KINDS])
every_decoder = pytest.mark.parametrize("decoder", [pair[0] for pair in DECODERS.values()], ids=list(DECODERS))


def instances(kind: Any) -> st.SearchStrategy[Any]:
    """Generate values of a type from its own description, ranges included."""
    return _build(inspect.type_info(kind))


def _build(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.StructType():
            needed = {f.name: _build(f.type) for f in info.fields if f.required}
            optional = {f.name: _build(f.type) for f in info.fields if not f.required}
            return st.fixed_dictionaries(needed, optional=optional).map(lambda given: info.cls(**given))
        case inspect.UnionType():
            return st.one_of([_build(t) for t in info.types])
        case inspect.VarTupleType():
            most = min(3, info.max_length if info.max_length is not None else 3)
            return st.lists(_build(info.item_type), min_size=info.min_length or 0, max_size=most).map(tuple)
        case inspect.DictType():
            return st.dictionaries(_build(info.key_type), _build(info.value_type), max_size=2)
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case inspect.IntType():
            least = info.ge if info.ge is not None else -(2**63)
            most = info.le if info.le is not None else info.lt - 1 if info.lt is not None else 2**63 - 1
            return st.integers(least, most)
        case inspect.FloatType():
            least = info.ge if info.ge is not None else info.gt
            return st.floats(least, info.le, exclude_min=info.gt is not None, allow_nan=False)
        case inspect.CustomType(cls=TokenIds):
            return st.lists(st.integers(0, 2**31 - 1), max_size=3).map(TokenIds.of)
        case inspect.BytesType():
            return st.binary(max_size=20)
        case inspect.StrType():
            return st.text(min_size=info.min_length or 0, max_size=min(8, info.max_length or 8))
        case inspect.AnyType():
            return st.one_of(st.none(), st.integers(-5, 5), st.text(max_size=3))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
    raise NotImplementedError(info)


def builtins(message: Message) -> dict[str, Any]:
    return msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=to_wire)


def raw(message: Message, **changes: object) -> bytes:
    """Encode a message with fields changed or added by hand."""
    return msgspec.msgpack.encode({**builtins(message), **changes})


# ---- Round trips --------


@every_kind
@settings(max_examples=25)
@given(data=st.data())
def test_a_message_decodes_to_what_was_encoded(decoder, kind, data):
    message = data.draw(instances(kind))
    frames = encode(message)
    assert len(frames) == 1
    assert decode(decoder, frames) == message
    assert type(decode(decoder, [memoryview(frames[0])])) is kind


def test_every_message_class_is_in_a_union():
    listed = {kind for _, kinds in DECODERS.values() for kind in kinds}
    assert set(Message.__subclasses__()) == listed


@every_kind
def test_a_message_names_its_class_on_the_wire(decoder, kind):
    message = _simplest(kind)
    assert msgspec.msgpack.decode(encode(message)[0])["type"] == kind.__name__


def _simplest(kind: type[Message]) -> Message:
    """Return an instance in which every field is filled, the same one each time."""

    def value(info: inspect.Type) -> Any:
        match info:
            case inspect.StructType():
                return info.cls(**{f.name: value(f.type) for f in info.fields})
            case inspect.UnionType():
                return value(next(t for t in info.types if not isinstance(t, inspect.NoneType)))
            case inspect.VarTupleType():
                return (value(info.item_type),)
            case inspect.DictType():
                return {"key": value(info.value_type)}
            case inspect.LiteralType():
                return info.values[-1]
            case inspect.IntType():
                return max(1, info.ge or 0)
            case inspect.FloatType():
                return 0.5
            case inspect.CustomType(cls=TokenIds):
                return TokenIds.of([1])
            case inspect.BytesType():
                return b"x"
            case inspect.StrType() | inspect.AnyType():
                return "x"
            case inspect.BoolType():
                return True
        raise NotImplementedError(info)

    return value(inspect.type_info(kind))


# ---- What is not a message --------


@every_decoder
@given(data=st.binary(max_size=200))
def test_garbage_is_a_bad_request(decoder, data):
    with pytest.raises(BadRequest):
        decode(decoder, [data])


@every_decoder
@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x91" * 100_000, b"\x81\xa4type" * 50_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
     b"\xdb\xff\xff\xff\xff", b"\x81\xa4type\xa4\xff\xfe\xfd\xfc", b"\x81\xa4\xff\xff\xff\xff\xc0"],
    ids=["nothing", "unused", "nested arrays", "nested maps", "huge array", "huge map", "huge string",
         "tag not UTF-8", "key not UTF-8"],
)  # fmt: skip
def test_hostile_bytes_are_a_bad_request(decoder, data):
    with pytest.raises(BadRequest):
        decode(decoder, [data])


@every_kind
def test_a_truncated_message_is_a_bad_request(decoder, kind):
    data = encode(_simplest(kind))[0]
    assert decode(decoder, [data]) == _simplest(kind)
    for end in range(len(data)):
        with pytest.raises(BadRequest):
            decode(decoder, [data[:end]])


@every_kind
def test_bytes_after_a_message_are_a_bad_request(decoder, kind):
    with pytest.raises(BadRequest):
        decode(decoder, [encode(_simplest(kind))[0] + b"\x00"])


@every_kind
@settings(max_examples=25)
@given(data=st.data())
def test_a_damaged_message_is_a_message_or_a_bad_request(decoder, kind, data):
    damaged = bytearray(encode(_simplest(kind))[0])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(decode(decoder, [bytes(damaged)]), Message)
    except BadRequest:
        pass


@every_decoder
@pytest.mark.parametrize("frames", [[], [b"a", b"b"]])
def test_a_message_is_one_frame(decoder, frames):
    with pytest.raises(BadRequest, match=rf"^expected 1 frame, got {len(frames)}$"):
        decode(decoder, frames)


@every_decoder
@pytest.mark.parametrize("tag", ["Struct", "RequestBody", "hello", "", 3, None])
def test_an_unknown_tag_is_refused(decoder, tag):
    with pytest.raises(BadRequest):
        decode(decoder, [msgspec.msgpack.encode({"type": tag})])


@every_kind
def test_a_message_for_somebody_else_is_refused(decoder, kind):
    for other, kinds in DECODERS.values():
        if kind not in kinds:
            with pytest.raises(BadRequest):
                decode(other, encode(_simplest(kind)))


@every_kind
def test_an_unknown_field_is_refused(decoder, kind):
    with pytest.raises(BadRequest, match="surplus"):
        decode(decoder, [raw(_simplest(kind), surplus=1)])


@every_kind
def test_a_missing_field_is_refused_by_name(decoder, kind):
    fields = builtins(_simplest(kind))
    for field in [f.name for f in msgspec.structs.fields(kind) if f.required]:
        with pytest.raises(BadRequest, match=field):
            decode(decoder, [msgspec.msgpack.encode({k: v for k, v in fields.items() if k != field})])


# ---- Ranges --------

GOOD: list[tuple[str, list[object]]] = [
    ("max_tokens", [1, 2**20]),
    ("min_tokens", [0, 2**20]),
    ("temperature", [0, 0.0, 100.0]),
    ("top_p", [1e-9, 1.0]),
    ("top_k", [0, 2**20]),
    ("seed", [0, 2**63 - 1]),
    ("logprobs", [0, 20]),
    ("ignore_eos", [True, False]),
    ("priority", ["interactive", "batch"]),
    ("deadline_ms", [None, 1e-9, 86_400_000.0]),
    ("stop", ["x", "x" * 256, [], ["x"] * 16]),
    ("prompt_token_ids", [None, [], [0, 2**31 - 1]]),
    ("id", [None, "", "x" * 128, 0, 2**53]),
    ("messages", [None, [], [{"role": "user", "content": ["anything"]}]]),
    ("save_final_kv", [True, False]),
]
BAD: list[tuple[str, list[object]]] = [
    ("max_tokens", [0, -1, 2**20 + 1, "64", 1.5, None, True]),
    ("min_tokens", [-1, 2**20 + 1, "0"]),
    ("temperature", [-1e-9, 100.1, "1", float("nan"), float("inf")]),
    ("top_p", [0.0, -0.1, 1.0001, float("nan")]),
    ("top_k", [-1, 2**20 + 1]),
    ("seed", [-1, 2**63]),
    ("logprobs", [-1, 21]),
    ("ignore_eos", [0, "true"]),
    ("priority", ["urgent", "", 1]),
    ("deadline_ms", [0.0, -1, 86_400_001.0, float("nan")]),
    ("stop", ["", "x" * 257, [""], ["x"] * 17, [1], 1]),
    ("prompt_token_ids", [[-1], [2**31], ["1"], "1"]),
    ("id", ["x" * 129, -1, 2**53 + 1, 1.5, []]),
    ("messages", [[1], "hi", {"role": "user"}]),
    ("save_final_kv", [1]),
]
SAMPLING = list(Sampling.__struct_fields__)


def pairs(table: list[tuple[str, list[object]]]) -> list[Any]:
    return [pytest.param(f, v, id=f"{f}={str(v)[:20]}") for f, values in table for v in values]


def request_with(field: str, value: object) -> bytes:
    return msgspec.msgpack.encode({"type": "ClientRequest", "body": {"prompt": "p", field: value}})


def test_the_tables_cover_every_field_with_a_range():
    named = {field for field, _ in BAD}
    assert named == {field for field, _ in GOOD} == set(RequestBody.__struct_fields__) - {"prompt"}
    assert set(SAMPLING) <= named


@pytest.mark.parametrize(("field", "value"), pairs(GOOD))
def test_a_value_at_its_limit_is_taken(field, value):
    message = decode(to_gateway_decoder, [request_with(field, value)])
    assert isinstance(message, ClientRequest)
    taken = getattr(message.body, field)
    assert taken == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(("field", "value"), pairs(BAD))
def test_a_value_beyond_its_limit_is_refused_and_its_field_named_first(field, value):
    with pytest.raises(BadRequest) as caught:
        decode(to_gateway_decoder, [request_with(field, value)])
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize(("field", "value"), [p for p in pairs(BAD) if p.values[0] in SAMPLING])
def test_the_engines_part_has_the_same_ranges(field, value):
    generate = Generate("r", TokenIds.of([1]), Sampling())
    with pytest.raises(BadRequest, match=f"^sampling.{field}: "):
        decode(control_decoder, [raw(generate, sampling={field: value})])


def test_the_engines_part_is_made_from_the_request():
    body = RequestBody(
        max_tokens=9, min_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=4, ignore_eos=True, logprobs=2
    )
    assert body.sampling(9) == Sampling(9, 7, 0.5, 0.9, 3, 4, True, 2)
    assert body.sampling(5) == Sampling(5, 5, 0.5, 0.9, 3, 4, True, 2)


# ---- Words --------


def test_explain_puts_the_field_first():
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'{"max_tokens": 0}', type=RequestBody)
    assert explain(caught.value) == "max_tokens: expected `int` >= 1"


def test_explain_names_the_place_inside_a_field():
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'{"stop": ["x", ""]}', type=RequestBody)
    assert explain(caught.value).startswith("stop[1]: ")


def test_explain_says_what_is_malformed_when_no_field_is():
    assert explain(msgspec.DecodeError("Input data was truncated")) == "malformed message: Input data was truncated"


@given(event=st.one_of(instances(TokenEvent), instances(DoneEvent), instances(ErrorEvent)))
def test_an_event_is_one_line_of_json(event):
    line = encode_line(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line)["event"] == type(event).__struct_config__.tag


def test_a_line_holds_newlines_and_every_script_inside_its_text():
    text = "a\nb\r\u2028 ünï 漢字 🙂\x00"
    line = encode_line(TokenEvent("q", 0, 1, text))
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"id": "q", "event": "token", "index": 0, "token_id": 1, "text": text}


def test_a_line_leaves_out_what_is_not_set():
    assert json.loads(encode_line(ErrorEvent(None, "overloaded", "full", 1.5)))["retry_after_s"] == 1.5
    assert "retry_after_s" not in json.loads(encode_line(ErrorEvent(None, "internal", "broken")))
    assert issubclass(ErrorEvent, Event)


def test_defaults_do_not_travel():
    assert msgspec.msgpack.decode(encode(Heartbeat("ready"))[0]) == {"type": "Heartbeat", "state": "ready"}
