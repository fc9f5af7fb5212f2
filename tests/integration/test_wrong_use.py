"""Wrong use that only vLLM can tell; the rest is in tests/service/test_wrong_use.py."""

import time
from pathlib import Path

import pytest

from tests.broker import NatsServer
from tests.integration.served import REAL, measure
from tests.program import Program

pytestmark = REAL

WITHIN_S = 60.0

WRONG = {
    "an engine argument that nobody knows": ("a", ["--no-such-flag"], "--no-such-flag"),
    "a value that does not fit": ("a", ["--max-model-len", "100000"], "max_model_len"),
    "a hub name that cannot be had": ("nobody/has-this-model", [], "nobody/has-this-model"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_wrong_use_is_one_line_and_exit_code_2(
    broker: NatsServer, models: Path, tmp_path: Path, what: str
) -> None:
    model, arguments, culprit = WRONG[what]
    took_s: list[float] = []
    while not took_s or (min(took_s) >= WITHIN_S and len(took_s) < 2):  # whatever else runs can only delay
        program = await Program.start(
            tmp_path,
            *("serve", str(models / model) if model == "a" else model, "--nats", broker.url),
            *("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"),
            *("--admin-address", "127.0.0.1:0", "--", *arguments),
        )
        try:
            assert await program.end(10 * WITHIN_S) == 2, program.last_words()
            took_s.append(time.monotonic() - program.started_s)
            assert program.left() == []
            said = program.stderr()
            assert said.startswith("watchkeeper: error: "), said
            assert said.count("\n") == 1, said
            assert culprit in said
        finally:
            await program.kill()
    measure(f"{what} → exit", min(took_s), WITHIN_S)
