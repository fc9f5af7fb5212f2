"""What the simulated engine can be asked for: its options, and scripts for the verb `simulate`."""

import argparse
import math
from dataclasses import dataclass
from typing import NoReturn

from service.engine.protocol import EngineError, EngineRefused, JsonMap

CALL_MS: dict[str, float] = {
    "pause": 1,
    "resume": 1,
    "sleep": 5,
    "wake_up": 5,
    "init_weight_transfer": 5,
    "start_weight_update": 5,
    "update_weights": 5,
    "finish_weight_update": 5,
    "set_weight_version": 1,
    "reset_caches": 1,
    "shutdown_weight_transfer": 1,
    "ask": 0,
    "shutdown": 5,
}
"""How long each call takes, and the names of those that can be scripted."""

OUTCOMES = ("error", "hang", "delay", "die")
NOW_OUTCOMES = ("die", "hang", "pause_out_of_band", "resume_out_of_band", "refuse", "admit", "cut")

KV_LOAD_FAILURE_POLICIES = ("fail", "recompute")
"""The default first (vLLM 0.32, config/kv_transfer.py)."""


@dataclass
class Options:
    """What stands after `--` on the command line."""

    token_interval_s: float = 0.001
    load_s: float = 0.1
    load_error: str | None = None
    max_model_len: int = 131_072
    call_s: dict[str, float] | None = None
    prefill_base_s: float = 0
    prefill_token_s: float = 0
    kv_lease_s: float = 30
    kv_load_failure_policy: str = KV_LOAD_FAILURE_POLICIES[0]
    kv_host: str | None = None
    abort_keeps_kv: bool = False

    def duration_s(self, call: str) -> float:
        return (self.call_s or {}).get(call, CALL_MS[call] / 1000)

    def prefill_s(self, tokens: int) -> float:
        return self.prefill_base_s + self.prefill_token_s * tokens


@dataclass
class Script:
    """What one of the next calls of a name does instead of, or before, its work."""

    outcome: str
    delay_s: float
    times: int


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EngineRefused(f"simulated engine: {message}")


def parse_options(engine_args: list[str]) -> Options:
    parser = _Parser(prog="sim", add_help=False, allow_abbrev=False)
    parser.add_argument("--token-interval-ms", type=_not_negative, default=1.0)
    parser.add_argument("--load-s", type=_not_negative, default=0.1)
    parser.add_argument("--load-error")
    parser.add_argument("--max-model-len", type=int, default=Options.max_model_len)
    parser.add_argument("--call-ms", type=_durations, action="append", default=[])
    parser.add_argument("--prefill-ms", type=_not_negative, default=0.0)
    parser.add_argument("--prefill-us-per-token", type=_not_negative, default=0.0)
    # 30 s: vLLM's kv_lease_duration.
    parser.add_argument("--kv-lease-s", type=_not_negative, default=Options.kv_lease_s)
    parser.add_argument(
        "--kv-load-failure-policy",
        choices=KV_LOAD_FAILURE_POLICIES,
        default=Options.kv_load_failure_policy,
    )
    parser.add_argument("--kv-host")
    parser.add_argument("--abort-keeps-kv", action="store_true")
    given = parser.parse_args(engine_args)
    return Options(
        token_interval_s=given.token_interval_ms / 1000,
        load_s=given.load_s,
        load_error=given.load_error,
        max_model_len=given.max_model_len,
        call_s={name: ms / 1000 for durations in given.call_ms for name, ms in durations.items()},
        prefill_base_s=given.prefill_ms / 1000,
        prefill_token_s=given.prefill_us_per_token / 1e6,
        kv_lease_s=given.kv_lease_s,
        kv_load_failure_policy=given.kv_load_failure_policy,
        kv_host=given.kv_host,
        abort_keeps_kv=given.abort_keeps_kv,
    )


def _not_negative(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(text)
    return value


def _durations(text: str) -> dict[str, float]:
    durations = {}
    for part in text.split(","):
        name, _, ms = part.partition("=")
        if name not in CALL_MS:
            raise argparse.ArgumentTypeError(f"unknown call {name!r}, known are {', '.join(CALL_MS)}")
        try:
            durations[name] = _not_negative(ms)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=MILLISECONDS") from None
    return durations


def parse_script(script: JsonMap) -> tuple[str, Script]:
    call, outcome = script.get("call"), script.get("outcome")
    delay_s, times = script.get("delay_s", 0), script.get("times", 1)
    if not isinstance(call, str) or (call != "now" and call not in CALL_MS):
        raise EngineError(f"call must be now or one of {', '.join(CALL_MS)}")
    allowed = NOW_OUTCOMES if call == "now" else OUTCOMES
    if not isinstance(outcome, str) or outcome not in allowed:
        raise EngineError(f"outcome must be one of {', '.join(allowed)}")
    if isinstance(delay_s, bool) or not isinstance(delay_s, int | float) or not 0 <= delay_s < math.inf:
        raise EngineError("delay_s must be a number of seconds, not negative")
    if isinstance(times, bool) or not isinstance(times, int) or times < 1:
        raise EngineError("times must be a positive integer")
    return call, Script(outcome, float(delay_s), times)
