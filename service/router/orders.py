"""What a request asks for, and the requests that a router makes of it. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
INFERENCE = (COMPLETIONS, CHAT)

BYTES_PER_TOKEN = 4
"""A guess that is good enough to compare loads by."""

DEFAULT_MAX_TOKENS = 16
"""Of a completion, in OpenAI's API and in vLLM; a chat has none."""

Body = dict[str, Any]

_GUIDED = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "structural_tag",
)


class BadOrder(Exception):
    """The body is not one of the API; the text says what is wrong."""


@dataclass
class Order:
    """One request for inference.

    Attributes:
        raw: the body as it came.
        body: what it says.
        prompt_tokens: about how many.
    """

    path: str
    raw: bytes
    body: Body
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = max(1, _prompt_tokens(self.body, self.chat))

    @classmethod
    def parse(cls, path: str, raw: bytes) -> "Order":
        """
        Raises:
            BadOrder
        """
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadOrder(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadOrder("the body is not a JSON object")
        return cls(path, raw, body)

    @property
    def chat(self) -> bool:
        return self.path == CHAT

    @property
    def model(self) -> str:
        model = self.body.get("model")
        return model if isinstance(model, str) else ""

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True

    @property
    def splittable(self) -> bool:
        """Whether one instance can prefill for another: one prompt, one answer."""
        body = self.body
        return (
            _one(body.get("n"))
            and _one(body.get("best_of"))
            and not body.get("echo")
            and body.get("prompt_logprobs") is None
            and (self.chat or _is_one_prompt(body.get("prompt")))
        )

    @property
    def migratable(self) -> bool:
        """Whether a broken stream can go on elsewhere from what was delivered of it.

        Not if more than the text decides what follows: a grammar, tools, several answers; nor with
        log-probabilities, whose offsets would begin anew.
        """
        body = self.body
        return (
            self.stream
            and self.splittable
            and not body.get("use_beam_search")
            and not any(body.get(name) is not None for name in _GUIDED)
            and body.get("logprobs") in (None, False)
            and body.get("top_logprobs") is None
            and (not body.get("tools") or body.get("tool_choice") == "none")
        )

    @property
    def max_tokens(self) -> int | None:
        """How many tokens the answer may have, if the request says so."""
        for name in ("max_completion_tokens", "max_tokens") if self.chat else ("max_tokens",):
            value = self.body.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None


def for_prefill(body: Body) -> Body:
    """What the prefill instance is asked: the prompt's KV cache, kept for another engine."""
    made = {name: value for name, value in body.items() if name != "stream_options"}
    made |= {"stream": False, "max_tokens": 1, "min_tokens": 1}
    if "max_completion_tokens" in made:
        made["max_completion_tokens"] = 1
    made["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    return made


def for_decode(body: Body, kv_transfer_params: Any) -> Body:
    """What the decode instance is asked. The parameters are the engines' own affair.

    Args:
        kv_transfer_params: as the prefill instance gave them; None: it gave none.
    """
    if kv_transfer_params is None:
        return {name: value for name, value in body.items() if name != "kv_transfer_params"}
    return {**body, "kv_transfer_params": kv_transfer_params}


def for_fetch(body: Body, kv_transfer_params: Any) -> Body:
    """What a decode instance is asked for no other reason than that it fetches the KV cache."""
    made = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens")}
    made |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in made:
        made["max_completion_tokens"] = 1
    return for_decode(made, kv_transfer_params)


@dataclass
class Delivered:
    """What a client has of a stream.

    Attributes:
        tokens: how many those are, as the engine counts.
        ids: the tokens themselves, where the prompt is ids.
    """

    text: str = ""
    tokens: int = 0
    ids: list[int] = field(default_factory=list)


def for_rest(order: Order, delivered: Delivered) -> Body | None:
    """What is asked elsewhere so that a broken stream goes on: the prompt and what was delivered.

    Returns:
        None if nothing is left to be asked for.
    """
    body = dict(order.body)
    if order.chat:
        messages = list(body["messages"])
        if body.get("continue_final_message") is True:
            last = dict(messages[-1])
            last["content"] = _joined(last.get("content"), delivered.text)
            messages[-1] = last
        elif delivered.text:
            messages.append({"role": "assistant", "content": delivered.text})
        body["messages"] = messages
        if delivered.text:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
    else:
        prompt = _only(body["prompt"])
        body["prompt"] = prompt + delivered.text if isinstance(prompt, str) else [*prompt, *delivered.ids]
    if not order.chat:
        body.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    for name in ("max_completion_tokens", "max_tokens", "min_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            left = value - delivered.tokens
            if name != "min_tokens" and left < 1:
                return None
            body[name] = max(0, left)
    return body


def by_ids(order: Order) -> bool:
    """Whether the prompt is token ids, so that only ids can be appended to it."""
    if order.chat:
        return False
    return isinstance(_only(order.body.get("prompt")), list)


def _only(prompt: Any) -> Any:
    """The prompt, also if it stands in a list as the only one."""
    return prompt[0] if _nested(prompt) else prompt


def _nested(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list)


def _is_one_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str) or _nested(prompt):
        return True
    return isinstance(prompt, list) and bool(prompt) and all(type(item) is int for item in prompt)


def _one(value: Any) -> bool:
    return value is None or value == 1


def _joined(content: Any, text: str) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return (content or "") + text


def _prompt_tokens(body: Mapping[str, Any], chat: bool) -> int:
    if not chat:
        return _length(body.get("prompt"))
    messages = body.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return 0
    return sum(_length(message.get("content")) for message in messages if isinstance(message, dict))


def _length(value: Any) -> int:
    """Tokens of a prompt or of a message's content: text, ids, or a list of either."""
    match value:
        case str():
            return len(value) // BYTES_PER_TOKEN + 1
        case dict():
            return _length(value.get("text"))
        case [int(), *_]:
            return len(value)
        case list():
            return sum(map(_length, value))
    return 0
