"""What a router makes of a request."""

import json
from typing import Any

import pytest

from service.router import orders
from service.router.orders import CHAT, COMPLETIONS, BadOrder, Delivered, Order


def order(path: str = COMPLETIONS, **body: Any) -> Order:
    body = {"model": "m", **body}
    return Order.parse(path, json.dumps(body).encode())


def chat(*contents: Any, **body: Any) -> Order:
    return order(CHAT, messages=[{"role": "user", "content": content} for content in contents], **body)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b"[" * 100_000, b"\xff"])
def test_what_is_no_request_is_told_so(raw: bytes) -> None:
    with pytest.raises(BadOrder, match="the body is not"):
        Order.parse(COMPLETIONS, raw)


@pytest.mark.parametrize(
    ("one", "tokens"),
    [
        (order(prompt="a" * 400), 101),
        (order(prompt=[1, 2, 3]), 3),
        (order(prompt=["a" * 40, "b" * 40]), 22),
        (order(prompt=[[1, 2], [3]]), 3),
        (order(prompt=None), 1),
        (order(), 1),
        (chat("a" * 400, "b"), 102),
        (chat([{"type": "text", "text": "a" * 400}, {"type": "image_url", "image_url": {}}]), 101),
        (order(CHAT, messages="nonsense"), 1),
        (order(CHAT, messages=[3, None]), 1),
    ],
)
def test_prompts_are_measured_in_tokens(one: Order, tokens: int) -> None:
    assert one.prompt_tokens == tokens


def test_the_prefill_is_asked_for_one_token_and_to_keep_the_cache() -> None:
    """vLLM's two hops (toy_proxy_server.py); min_tokens, so that an early end does not lose the cache."""
    body = order(prompt="a", stream=True, stream_options={"include_usage": True}, max_tokens=50).body
    asked = orders.for_prefill(body)
    assert asked["stream"] is False and asked["max_tokens"] == 1 and asked["min_tokens"] == 1
    assert "stream_options" not in asked and "max_completion_tokens" not in asked
    assert asked["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert orders.for_prefill(chat("a", max_completion_tokens=9).body)["max_completion_tokens"] == 1
    assert body["max_tokens"] == 50 and body["stream"] is True


def test_the_decode_gets_the_parameters_as_they_came() -> None:
    body = order(prompt="a", max_tokens=50).body
    given = {"remote_block_ids": [[1, 2]], "of_a_later_version": {"x": 1}}
    assert orders.for_decode(body, given) == {**body, "kv_transfer_params": given}
    assert "kv_transfer_params" not in orders.for_decode({**body, "kv_transfer_params": {}}, None)


@pytest.mark.parametrize(
    ("one", "may"),
    [
        (order(prompt="a", stream=True), True),
        (order(prompt=["a"], stream=True), True),
        (order(prompt=[1, 2], stream=True), True),
        (chat("a", stream=True), True),
        (chat("a", stream=True, tools=[{}], tool_choice="none"), True),
        (order(prompt="a", stream=True, logprobs=False), True),
        (order(prompt="a"), False),
        (order(prompt=["a", "b"], stream=True), False),
        (order(prompt="a", stream=True, n=2), False),
        (order(prompt="a", stream=True, best_of=2), False),
        (order(prompt="a", stream=True, echo=True), False),
        (order(prompt="a", stream=True, logprobs=1), False),
        (chat("a", stream=True, logprobs=True), False),
        (chat("a", stream=True, top_logprobs=2), False),
        (chat("a", stream=True, response_format={"type": "json_object"}), False),
        (order(prompt="a", stream=True, structured_outputs={"regex": "a"}), False),
        (order(prompt="a", stream=True, guided_json={}), False),
        (chat("a", stream=True, tools=[{}]), False),
        (order(prompt="a", stream=True, use_beam_search=True), False),
    ],
)
def test_what_may_go_on_elsewhere(one: Order, may: bool) -> None:
    assert one.migratable is may


def test_the_rest_of_a_completion() -> None:
    one = order(prompt="Once", max_tokens=10, min_tokens=8, seed=1)
    rest = orders.for_rest(one, Delivered(text=" upon a", tokens=3))
    assert rest == {"model": "m", "prompt": "Once upon a", "max_tokens": 7, "min_tokens": 5, "seed": 1}
    assert one.body["prompt"] == "Once"


def test_the_rest_of_a_completion_without_a_limit_is_that_of_the_default() -> None:
    rest = orders.for_rest(order(prompt="Once"), Delivered(text=" upon", tokens=1))
    assert rest is not None and rest["max_tokens"] == 15


def test_the_rest_of_a_prompt_of_ids() -> None:
    rest = orders.for_rest(order(prompt=[[5, 6]], max_tokens=4), Delivered("x", 2, [7, 8]))
    assert rest is not None and rest["prompt"] == [5, 6, 7, 8]


def test_the_rest_of_a_chat_continues_the_last_message() -> None:
    rest = orders.for_rest(chat("hi", max_completion_tokens=5), Delivered("Hel", 1))
    assert rest is not None
    assert rest["messages"] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel"}]
    assert rest["continue_final_message"] is True and rest["add_generation_prompt"] is False
    assert rest["max_completion_tokens"] == 4


def test_the_rest_of_a_message_that_was_a_continuation_itself() -> None:
    one = order(
        CHAT,
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    rest = orders.for_rest(one, Delivered("llo", 1))
    assert rest is not None and rest["messages"][-1] == {"role": "assistant", "content": "Hello"}
    assert one.body["messages"][-1]["content"] == "He"


def test_of_a_chat_that_delivered_nothing_everything_is_left() -> None:
    one = chat("hi", max_tokens=5)
    assert orders.for_rest(one, Delivered()) == one.body


def test_nothing_is_left_of_an_answer_that_has_all_its_tokens() -> None:
    assert orders.for_rest(order(prompt="a", max_tokens=3), Delivered(" b c d", 3)) is None
