"""Streams on their way: what is passed on, how they end, and how they go on."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.router import sse
from service.router.breaker import Outcome
from service.router.orders import CHAT, COMPLETIONS, Order
from service.router.relay import Continuable, End, Relay

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chunk(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return event({"id": "cmpl-1", "created": 7, "model": "m", "choices": [choice], **more})


def order(path: str = COMPLETIONS, **body: Any) -> Order:
    body = {"stream": True, "prompt": "p", "max_tokens": 5, **body}
    return Order.parse(path, json.dumps(body).encode())


def shown(data: bytes) -> list[dict[str, Any]]:
    return [one.data for one in sse.events(data) if one.data is not None]


@given(
    st.lists(st.sampled_from([chunk("a"), chunk("é"), DONE, b": ping\n\n", b"data: x\r\n\r\n"])), st.data()
)
def test_events_are_whole_however_the_bytes_come(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(parts)
    splitter, got = sse.Splitter(), b""
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        block = splitter.feed(stream[:size])
        assert not block or block.endswith((b"\n\n", b"\r\n\r\n"))
        got, stream = got + block, stream[size:]
    assert got == b"".join(parts) and splitter.rest == b""


def test_what_is_no_whole_event_is_held_back() -> None:
    splitter = sse.Splitter()
    assert splitter.feed(b"data: a\n\ndata: b") == b"data: a\n\n"
    assert splitter.rest == b"data: b"
    assert splitter.feed(b"\n") == b""
    assert splitter.feed(b"\ndata") == b"data: b\n\n"


def test_a_good_stream_passes_untouched() -> None:
    relay = Relay()
    block = b": comment\n\n" + chunk(" a")
    assert relay.take(block) == (block, None)
    assert relay.take(chunk(" b", "length") + DONE) == (chunk(" b", "length") + DONE, End())
    assert relay.tokens == 3  # chunks, and the last word: near enough for a load


def test_text_that_only_looks_like_an_end_is_text() -> None:
    block = chunk('data: [DONE] {"error": 1} "abort"')
    assert Relay().take(block) == (block, None)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("engine_paused", Outcome.UNKNOWN),
        ("shutting_down", Outcome.UNKNOWN),
        ("engine_failed", Outcome.BAD),
        (500, Outcome.BAD),
        (400, Outcome.GOOD),
    ],
)
def test_an_error_in_the_stream_is_its_end(code: object, outcome: Outcome) -> None:
    error = {"code": code, "message": "no"}
    block = chunk(" a") + event({"error": error}) + chunk(" not any more") + DONE
    assert Relay().take(block) == (chunk(" a"), End(error, outcome))


def test_an_abort_is_no_end_that_a_client_could_take_for_a_good_one() -> None:
    passed, end = Relay().take(chunk(" a") + chunk(" b", "abort") + DONE)
    assert [one["choices"][0]["finish_reason"] for one in shown(passed)] == [None, None]
    assert [one["choices"][0]["text"] for one in shown(passed)] == [" a", " b"]
    assert end is not None and end.outcome is Outcome.UNKNOWN
    assert end.error is not None and end.error["code"] == "aborted" and end.error["retryable"] is True
    assert Relay().take(chunk("", "abort") + DONE)[0] == b""


def usage(prompt: int, completion: int) -> dict[str, Any]:
    numbers = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"usage": {**numbers, "total_tokens": prompt + completion}}


def test_the_client_sees_one_answer_from_two_engines() -> None:
    relay = Continuable(order())
    asked = relay.asked(order().body)
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    out, end = relay.take(chunk(" a", **usage(3, 1)) + chunk(" b", **usage(3, 2)))
    assert end is None and all("usage" not in one for one in shown(out))
    rest = relay.rest()
    assert rest is not None and rest["prompt"] == "p a b" and rest["max_tokens"] == 3
    second = event(
        {"id": "cmpl-2", "created": 9, "model": "m", "choices": [{"index": 0, "text": " c"}], **usage(5, 1)}
    )
    out, end = relay.take(second)
    assert [(one["id"], one["created"]) for one in shown(out)] == [("cmpl-1", 7)]
    assert relay.delivered.tokens == 3 and relay.delivered.text == " a b c"
    end_of_it = event({"id": "cmpl-2", "choices": [], **usage(5, 3)}) + DONE
    out, end = relay.take(chunk(" e", "length", **usage(5, 3)) + end_of_it)
    assert end == End() and out.endswith(DONE) and len(shown(out)) == 1


def test_the_usage_is_that_of_the_whole_answer() -> None:
    one = order(stream_options={"include_usage": True})
    relay = Continuable(one)
    relay.take(chunk(" a", **usage(3, 1)) + chunk(" b", **usage(3, 2)))
    relay.rest()
    out, _ = relay.take(
        chunk(" c", "length", **usage(5, 1)) + event({"id": "x", "choices": [], **usage(5, 1)})
    )
    assert [one.get("usage") for one in shown(out)] == [None, usage(3, 3)["usage"]]


def test_a_chat_begins_once() -> None:
    relay = Continuable(order(CHAT, messages=[{"role": "user", "content": "hi"}]))
    role = event({"id": "1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    text = event({"id": "1", "choices": [{"index": 0, "delta": {"content": "He"}}]})
    assert len(shown(relay.take(role + text)[0])) == 2
    relay.rest()
    assert len(shown(relay.take(role + text)[0])) == 1


def test_a_chat_that_broke_after_its_first_word_begins_once_too() -> None:
    relay = Continuable(order(CHAT, messages=[{"role": "user", "content": "hi"}]))
    role = event({"id": "1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    relay.take(role)
    relay.rest()
    assert relay.take(role)[0] == b""


def test_ids_are_asked_for_and_not_shown_where_the_prompt_is_ids() -> None:
    relay = Continuable(order(prompt=[1, 2]))
    assert relay.asked(order(prompt=[1, 2]).body)["return_token_ids"] is True
    choice = {"index": 0, "text": " a", "token_ids": [9], "prompt_token_ids": [1, 2]}
    out, _ = relay.take(event({"id": "1", "choices": [choice]}))
    assert shown(out) == [{"id": "1", "choices": [{"index": 0, "text": " a"}]}]
    rest = relay.rest()
    assert rest is not None and rest["prompt"] == [1, 2, 9]


def test_an_answer_of_which_only_the_end_is_missing_is_ended() -> None:
    relay = Continuable(order(max_tokens=2, stream_options={"include_usage": True}))
    relay.take(chunk(" a", **usage(3, 1)) + chunk(" b", **usage(3, 2)))
    assert relay.rest() is None
    words = relay.last_words()
    last, total = shown(words)
    assert words.endswith(DONE) and last["choices"][0]["finish_reason"] == "length" and last["id"] == "cmpl-1"
    assert total["usage"] == usage(3, 2)["usage"]


def test_without_usage_tokens_are_counted_by_their_chunks() -> None:
    relay = Continuable(order())
    relay.take(chunk(" a") + chunk(" b"))
    rest = relay.rest()
    assert rest is not None and rest["max_tokens"] == 3
    relay.take(chunk(" c"))
    rest = relay.rest()
    assert rest is not None and rest["max_tokens"] == 2 and rest["prompt"] == "p a b c"
