"""What a person at the terminal sees: our log and the engine's on stdout, what ends us on stderr."""

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from service.options import SettingsError

if TYPE_CHECKING:
    from service.traffic import Identity


def log_to_stdout(quiet: bool = False) -> None:
    """quiet: warnings only; many instances in one process have nothing to say to a person."""
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(
        stream=sys.stdout, level=level, format="%(asctime)s %(levelname)-7s %(message)s", force=True
    )
    logging.getLogger("transitions").setLevel(logging.WARNING)  # it reports every event


def welcome(me: "Identity", model: str, nats: str) -> None:
    """Tell a person at the terminal where everything is, and what to try next."""
    command = sys.argv[0] if Path(sys.argv[0]).name == "watchkeeper" else "watchkeeper"
    broker = "" if nats == "nats://127.0.0.1:4222" else f" --nats {nats}"
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 16})
    print(
        f"""
{me.instance} is ready.
    OpenAI API    http://{me.http}/v1
    gRPC health   {me.grpc}
    admin         http://{me.admin}
    NATS          {nats}
Try next, in another terminal:
    curl http://{me.http}/v1/completions -H 'Content-Type: application/json' -d '{body}'
    {command} pause --instance {me.instance} --mode keep{broker}
    {command} probe {me.grpc} readiness
""",
        flush=True,
    )


def write_ready_file(path: Path, content: Mapping[str, object]) -> None:
    """Put `content` there, as JSON, so that a reader finds all of it or nothing.

    Raises:
        SettingsError
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(content) + "\n")
        draft.rename(path)
    except OSError as error:
        raise SettingsError(f"--ready-file: cannot write {str(path)!r}: {error.strerror}") from error


def complain(text: str) -> None:
    """Say in one line on stderr why the process ends."""
    sys.stdout.flush()
    print(f"watchkeeper: error: {' '.join(text.split())}", file=sys.stderr, flush=True)


class EngineOutput:
    """Passes on what the engine writes, once its configuration is known to be good.

    Before that, what goes wrong is told in one line of our own.
    """

    def __init__(self) -> None:
        self._held: list[str] | None = []

    def line(self, text: str) -> None:
        if self._held is not None:
            self._held.append(text)
            del self._held[:-200]
        else:
            print(f"engine | {text}", flush=True)

    def open(self) -> None:
        held, self._held = self._held, None
        for text in held or ():
            self.line(text)
