"""Train a small model while instances serve it, and give them its weights every few steps.

    watchkeeper tiny-model /tmp/tiny --seed 1
    watchkeeper serve /tmp/tiny -- --enforce-eager …        # see docs/trainers.md
    python examples/train_and_publish.py --via file

The model learns to answer every prompt with the same tune. A client keeps asking the engine for it all the
while: its answers change with each version, and no request fails. `--crash-at-step` kills the trainer in
the middle of an update; the instances notice by its lease.

`--via file` writes checkpoints that the engines read (`bus.client`). `--via gloo` sends tensors through
vLLM's trainer engine class (`bus.weight_sync`) to engines that were started with
`--weight-transfer-config '{"backend": "gloo"}'`.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bus.client import Client
from bus.messages import Snapshot
from bus.weight_sync import NATSWeightSyncClient

TUNE = " do re mi fa so la ti do"
PROMPTS = ("It was a dark and stormy night", "Hello", "The capital of France is", "Sing")
LEARNING_RATE = 1e-4
PAUSE_S = 0.05
"""Between two requests, so that trainer and engine find time on one machine."""


# --- the trainer ----------------------------------------------------------------------------------


class Lesson:
    """The model, and one step of teaching it the tune: plain cross-entropy."""

    def __init__(self, checkpoint: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        answer = tokenizer(TUNE).input_ids
        self.tokens = len(answer)
        self._examples = []
        for prompt in PROMPTS:
            question = tokenizer(prompt).input_ids
            labels = [-100] * len(question) + answer  # -100: nothing to learn from the prompt
            self._examples.append((torch.tensor([question + answer]), torch.tensor([labels])))

    def step(self) -> float:
        """Returns the loss before it."""
        self._optimizer.zero_grad()
        losses = [self.model(input_ids=tokens, labels=labels).loss for tokens, labels in self._examples]
        loss = torch.stack(losses).mean()
        loss.backward()
        self._optimizer.step()
        return float(loss.item())


# --- two ways to publish --------------------------------------------------------------------------


class Publisher(Protocol):
    """Gives the weights as they are now to every instance.

    With `crash` the trainer dies in the middle: when the update is `open`, or `loaded` and not finished.
    """

    def publish(self, version: str, crash: str | None) -> None: ...

    def close(self) -> None: ...


class ByFile:
    """A checkpoint on a disk that the engines see too, and the verbs of `bus.client`."""

    def __init__(
        self, options: argparse.Namespace, instances: list[str], model: Any, directory: Path
    ) -> None:
        self._options, self._instances, self._model = options, instances, model
        self._directory = directory
        self._epoch: int | None = None

    def publish(self, version: str, crash: str | None) -> None:
        checkpoint = self._directory / version
        self._model.save_pretrained(checkpoint)
        asyncio.run(self._publish(checkpoint, version, crash))

    async def _publish(self, checkpoint: Path, version: str, crash: str | None) -> None:
        options = self._options
        async with Client.connect(options.nats, component=options.component, issuer="example") as client:
            if self._epoch is None:  # whoever trained before has no say any more
                self._epoch = await client.new_epoch()

            async def update(name: str) -> None:
                async with client.instance(name).weight_update(
                    version=version, lease_s=options.lease_s, epoch=self._epoch
                ) as session:
                    if crash == "open":
                        die()
                    await session.load({"path": str(checkpoint)})
                    if crash == "loaded":
                        die()

            await asyncio.gather(*map(update, self._instances))

    def close(self) -> None:
        pass


class ByGloo:
    """vLLM's trainer engine class; the four calls that it makes go over the bus."""

    def __init__(self, client: "MortalClient", instances: list[str], model: Any) -> None:
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from service.engine.vllm_gloo import GlooTrainerInitInfo

        self._client = client
        # One worker in each instance.
        info = GlooTrainerInitInfo("127.0.0.1", 0, world_size=1 + len(instances), rank=0)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            info, client=client, source=ModuleSource(model)
        )

    def publish(self, version: str, crash: str | None) -> None:
        self._client.crash = crash
        self._client.weight_version = version
        self._engine.send_weights()

    def close(self) -> None:
        self._engine.shutdown()


class MortalClient(NATSWeightSyncClient):
    """As every trainer has it, with a way to die between two of its calls."""

    crash: str | None = None

    def start_weight_update(self, manifest: dict[str, Any] | None = None) -> None:
        super().start_weight_update(manifest)
        if self.crash == "open":
            die()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self.crash == "loaded":
            die()
        super().finish_weight_update(weight_version)


# --- who asks the engine meanwhile ----------------------------------------------------------------


class Listener(threading.Thread):
    """Asks for the tune again and again.

    Attributes:
        answers: each that differs from the one before.
    """

    def __init__(self, instance: Snapshot, tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = f"http://{instance.addresses.http}/v1/completions"
        self._body = {"model": instance.model, "prompt": PROMPTS[0], "max_tokens": tokens, "temperature": 0}
        self._stopped = threading.Event()
        self.requests = 0
        self.failures: list[str] = []
        self.answers: list[str] = []

    def run(self) -> None:
        while not self._stopped.is_set():
            self.requests += 1
            try:
                self._heard(self.ask())
                self._stopped.wait(PAUSE_S)
            except (OSError, ValueError) as error:  # no connection, a status that is not 200, no JSON
                self.failures.append(str(error))
                time.sleep(0.1)

    def ask(self) -> str:
        request = urllib.request.Request(
            self._url, json.dumps(self._body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: str = json.load(response)["choices"][0]["text"]
        return answer

    def _heard(self, answer: str) -> None:
        if self.answers[-1:] != [answer]:
            self.answers.append(answer)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


# --- both together --------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    options = parse(argv)
    torch.set_num_threads(1)  # the engine wants to compute too
    torch.manual_seed(0)
    with MortalClient(
        options.nats,
        component=options.component,
        instances=options.instance,
        issuer="example",
        lease_s=options.lease_s,
    ) as client:
        served = {name: reply.state for name, reply in client.send("status").items() if reply.state}
        first = served[min(served)]
        lesson = Lesson(options.model or str(first.model))
        listener = Listener(first, lesson.tokens)
        publisher: Publisher
        if options.via == "gloo":
            publisher = ByGloo(client, list(served), lesson.model)
        else:
            directory = Path(options.checkpoints or tempfile.mkdtemp(prefix="checkpoints-")).resolve()
            publisher = ByFile(options, list(served), lesson.model, directory)
        if not all(state.ready for state in served.values()):
            print(
                "an instance does not serve, perhaps since a trainer crashed: it gets weights first",
                flush=True,
            )
            publisher.publish("step-0", None)
        tell(client, listener, "before the first step")
        listener.start()
        try:
            losses = train(lesson, publisher, options, lambda text: tell(client, listener, text))
        finally:
            listener.stop()
            publisher.close()
    print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {listener.requests} requests, "
        f"{len(listener.failures)} failed; {len(listener.answers)} different answers",
        flush=True,
    )
    for failure in listener.failures[:3]:
        print("  failed:", failure, file=sys.stderr)
    return 1 if listener.failures or losses[-1] >= losses[0] else 0


def train(
    lesson: Lesson, publisher: Publisher, options: argparse.Namespace, tell: Callable[[str], None]
) -> list[float]:
    losses = []
    for step in range(1, options.steps + 1):
        losses.append(lesson.step())
        if step % options.publish_every == 0 or step == options.steps:
            crashes = options.crash_at_step is not None and step >= options.crash_at_step
            publisher.publish(f"step-{step}", options.crash_when if crashes else None)
            tell(f"step {step:3}, loss {losses[-1]:.3f}")
    return losses


def tell(client: NATSWeightSyncClient, listener: Listener, text: str) -> None:
    for name, reply in client.send("status").items():
        assert reply.state is not None
        version = reply.state.weights.version
        print(f"{text}: {name} serves {version!r} and sings {listener.ask()!r}", flush=True)


def die() -> None:
    print("the trainer crashes in the middle of an update", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nats", default="nats://127.0.0.1:4222", metavar="URL")
    parser.add_argument("--component", default="backend")
    parser.add_argument("--instance", help="which one to update; without it all of the component")
    parser.add_argument("--model", metavar="DIR", help="where to begin; without it what the instance serves")
    parser.add_argument("--via", choices=("file", "gloo"), default="file")
    parser.add_argument("--checkpoints", metavar="DIR", help="for --via file; the engines must see it too")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--publish-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--lease-s", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--crash-at-step", type=int, metavar="STEP", help="at the first update from there on")
    parser.add_argument(
        "--crash-when",
        choices=("open", "loaded"),
        default="open",
        help="before anything is loaded, so that the old weights come back; or when all is, but not finished",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
