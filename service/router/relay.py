"""A stream on its way to the client: what is passed on, how it ends, and what it takes to go on. No I/O."""

from dataclasses import dataclass
from typing import Any

from service.router import orders, sse
from service.router.breaker import Outcome
from service.router.orders import Body, Delivered, Order
from service.router.upstream import failure_of

ABORTED = {"code": "aborted", "retryable": True, "message": "the engine aborted the request"}


@dataclass(frozen=True)
class End:
    """How a stream ended.

    Attributes:
        error: what the client is told; None: it has all.
        outcome: what it says about the instance.
    """

    error: dict[str, Any] | None = None
    outcome: Outcome = Outcome.GOOD


def cut(reason: str) -> End:
    error = {"code": "stream_cut", "retryable": True, "message": f"the answer is not complete: {reason}"}
    return End(error, Outcome.BAD)


class Relay:
    """Passes events on untouched.

    Attributes:
        tokens: about how many have passed.
    """

    def __init__(self) -> None:
        self.tokens = 0

    def take(self, block: bytes) -> tuple[bytes, End | None]:
        """What the client gets of these whole events, and the end if they hold it."""
        self.tokens += block.count(b"data:")
        if not sse.notable(block):
            return block, None
        passed = []
        for event in sse.events(block):
            end = _end(event)
            if end is None or end.error is None:
                passed.append(event.raw)
            elif event.aborted:
                passed.append(_without_end(event))
            if end is not None:
                return b"".join(passed), end
        return block, None


class Continuable:
    """Passes events on, and keeps what is needed to go on elsewhere.

    The engine is asked for more than the client wants to see: how many tokens there are, and which.
    """

    def __init__(self, order: Order) -> None:
        self.delivered = Delivered()
        self.tokens = 0
        self._order = order
        options = order.body.get("stream_options") or {}
        self._wants_usage = bool(options.get("include_usage"))
        self._wants_usages = bool(options.get("continuous_usage_stats"))
        self._wants_ids = order.body.get("return_token_ids") is True
        self._by_ids = orders.by_ids(order)
        self._head: dict[str, Any] = {}
        """What is the same in every chunk of an answer."""
        self._prompt_tokens: int | None = None
        self._earlier = 0
        """Tokens from instances before this one."""
        self._counted = False
        self._again = False

    def asked(self, body: Body) -> Body:
        """The request with what we need to know."""
        usage = {"include_usage": True, "continuous_usage_stats": True}
        body = {**body, "stream_options": {**(body.get("stream_options") or {}), **usage}}
        return {**body, "return_token_ids": True} if self._by_ids else body

    def rest(self) -> Body | None:
        """What is asked of the next instance; None if nothing is missing but the last words."""
        self._earlier = self.delivered.tokens
        self._counted, self._again = False, True
        return orders.for_rest(self._order, self.delivered)

    def take(self, block: bytes) -> tuple[bytes, End | None]:
        """As `Relay.take`."""
        passed = []
        for event in sse.events(block):
            end = _end(event)
            if end is None or end.error is None:
                passed.append(event.raw if event.data is None else self._passed(event.data))
            elif event.aborted and event.data is not None:
                passed.append(self._passed(_unfinished(event.data)))
            if end is not None:
                return b"".join(passed), end
        return b"".join(passed), None

    def last_words(self) -> bytes:
        """The end of an answer of which only the end is missing: it has all tokens that were asked for."""
        empty: dict[str, Any] = {"delta": {}} if self._order.chat else {"text": ""}
        choice = {"index": 0, **empty, "logprobs": None, "finish_reason": "length"}
        words = sse.encode({**self._head, "choices": [choice]})
        if self._wants_usage:
            words += sse.encode({**self._head, "choices": [], "usage": self._usage({})})
        return words + sse.DONE

    def _passed(self, chunk: dict[str, Any]) -> bytes:
        if not self._head:
            self._head = {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}
        choices = chunk.get("choices") or []
        usage = chunk.get("usage") or {}
        self._count(choices, usage)
        shown = {**chunk, **self._head}
        if not choices:
            if not self._wants_usage:
                return b""
            shown["usage"] = self._usage(usage)
        elif self._wants_usages:
            shown["usage"] = self._usage(usage)
        else:
            shown.pop("usage", None)
        if not self._wants_ids:
            shown.pop("prompt_token_ids", None)
            shown["choices"] = choices = [
                {
                    name: value
                    for name, value in choice.items()
                    if name not in ("token_ids", "prompt_token_ids")
                }
                for choice in choices
            ]
        if self._again and choices and all(map(_opens, choices)):
            return b""  # the client has it from the first instance
        return sse.encode(shown)

    def _count(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> None:
        delivered = self.delivered
        for choice in choices:
            text = (choice.get("delta") or {}).get("content") if self._order.chat else choice.get("text")
            delivered.text += text or ""
            delivered.ids += choice.get("token_ids") or []
            if text and not self._counted:
                delivered.tokens += 1
        if isinstance(completion := usage.get("completion_tokens"), int):
            self._counted = True
            delivered.tokens = self._earlier + completion
        if self._prompt_tokens is None and isinstance(prompt := usage.get("prompt_tokens"), int):
            self._prompt_tokens = prompt
        self.tokens = delivered.tokens

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        prompt, completion = self._prompt_tokens or 0, self.delivered.tokens
        total = {"total_tokens": prompt + completion}
        return {**usage, "prompt_tokens": prompt, "completion_tokens": completion, **total}


def _end(event: sse.Event) -> End | None:
    if event.done:
        return End()
    if event.error is not None:
        failure = failure_of(event.error, "the stream ended with an error")
        return End(event.error, failure.outcome)
    return End(ABORTED, Outcome.UNKNOWN) if event.aborted else None


def _opens(choice: dict[str, Any]) -> bool:
    """Whether it is the beginning of a chat's answer, with nothing of the answer."""
    delta = choice.get("delta")
    return (
        isinstance(delta, dict)
        and "role" in delta
        and not delta.get("content")
        and not choice.get("finish_reason")
    )


def _unfinished(chunk: dict[str, Any]) -> dict[str, Any]:
    return {**chunk, "choices": [{**choice, "finish_reason": None} for choice in chunk["choices"]]}


def _without_end(event: sse.Event) -> bytes:
    """The text of a chunk that says that the answer was aborted; a client might take it for an end."""
    data = _unfinished(event.data or {"choices": []})
    texts = [choice.get("text") or (choice.get("delta") or {}).get("content") for choice in data["choices"]]
    return sse.encode(data) if any(texts) else b""
