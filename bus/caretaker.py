"""Holds a nats-server for the process that started it, so that the server may stay when that one ends.

    python -I -S caretaker.py STOP_S IDLE_S NATS_SERVER ARGUMENTS...

What is to become of the server is read from stdin:

    stop            stop it, for certain after STOP_S
    leave PORT      stop it once nobody has been connected for IDLE_S, as its monitoring port tells
    end of file     without a word: whoever started it was killed, and so is the server

The server is killed when this process ends before it. A program of its own: it imports only of the
standard library, and little, since the start of the server waits for it.
"""

import ctypes
import os
import select
import signal
import sys
import time

STDIN = 0
POLL_S = 0.25
ANSWER_TIMEOUT_S = 1.0
SILENT_S = 10.0
"""A server that does not tell for so long who is connected is taken to be deserted."""
_PR_SET_PDEATHSIG = 1


def main(stop_s: float, idle_s: float, command: list[str]) -> None:
    server = _start(command)
    ended = os.pidfd_open(server)
    readable, _, _ = select.select([STDIN, ended], [], [])
    order = os.read(STDIN, 100) if ended not in readable else b"stop"
    if order.startswith(b"leave ") and b"stop" not in order:
        _wait_until_deserted(int(order.split()[1]), idle_s, ended)
    if order:
        os.kill(server, signal.SIGTERM)
        select.select([ended], [], [], stop_s)
    os.kill(server, signal.SIGKILL)  # it is there, dead or alive, until we have waited for it
    os.waitpid(server, 0)


def _start(command: list[str]) -> int:
    libc, me = ctypes.CDLL(None), os.getpid()
    server = os.fork()
    if server:
        return server
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # kept over exec
        if os.getppid() == me:  # else we died before we asked
            os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
            os.execv(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _wait_until_deserted(port: int, idle_s: float, ended: int) -> None:
    """Return once nobody was connected for `idle_s`, on the order to stop, or when the server has ended."""
    watched = [STDIN, ended]
    end_s = time.monotonic() + SILENT_S
    while time.monotonic() < end_s:
        readable, _, _ = select.select(watched, [], [], POLL_S)
        if ended in readable:
            return
        if STDIN in readable:
            if os.read(STDIN, 100):
                return
            watched.remove(STDIN)
        occupied = _occupied(port)
        if occupied:
            end_s = time.monotonic() + SILENT_S
        elif occupied is not None:
            end_s = min(end_s, time.monotonic() + idle_s)


def _occupied(port: int) -> bool | None:
    """Whether somebody is connected; None if the server does not tell."""
    import json  # not before it is needed: the server has long been started
    import socket

    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_TIMEOUT_S) as connection:
            connection.sendall(b"GET /connz?limit=1 HTTP/1.0\r\nHost: localhost\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        return bool(json.loads(answer.partition(b"\r\n\r\n")[2])["num_connections"])
    except (OSError, ValueError, KeyError):
        return None


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
