"""The engine host: the process in which the engine and its HTTP server live.

    python -m service.engine.host --kind vllm|sim --socket PATH --http-fd N --parent-pid P MODEL -- ARGS

Started by `service.engine.process` in a process group of its own. It listens to its parent only:
SIGINT and SIGTERM are ignored, the parent's death is its own. vLLM's children import this module
again (multiprocessing's spawn), so it imports nothing heavy before `main`.
"""

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""

ORPHANED = 3
"""Exit code if the parent is gone already."""


def main(argv: Sequence[str]) -> int:
    own, engine_args = _split(list(argv))
    parser = argparse.ArgumentParser(prog="service.engine.host", allow_abbrev=False)
    parser.add_argument("--kind", choices=("vllm", "sim"), required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--http-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("model")
    options = parser.parse_args(own)

    _die_with_parent(options.parent_pid)
    # A handler of our own rather than SIG_IGN, which the engine's children would inherit.
    signal.signal(signal.SIGINT, _ignore)
    signal.signal(signal.SIGTERM, _ignore)
    # For our plugin in the engine's processes: they die with this one.
    os.environ["WATCHKEEPER_HOST_PID"] = str(os.getpid())
    # The threads of the RPC server do not survive a fork.
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")

    from service.engine.hosting import run_host

    return run_host(options.kind, options.model, engine_args, options.socket, options.http_fd)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _die_with_parent(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(ORPHANED)  # it died before it could be noticed


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # No finalisers: the engine's own may wait for processes that hang.
    os._exit(exit_code)
