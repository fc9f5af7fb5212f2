"""Writes the `*_pb2*` files of this package from the `.proto` files: `python service/engine/rpc/generate.py`.

Needs grpcio-tools, and mypy-protobuf for the types of the services.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = "service/engine/rpc"
FILES = ("host.proto", "control.proto")


def main() -> int:
    # The virtual path makes the generated imports absolute: `service.engine.rpc.host_pb2`.
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PACKAGE}=service/engine"]
    command += [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    # Who implements a part of a service answers UNIMPLEMENTED to the rest: no method is abstract.
    command += [f"--mypy_grpc_out=generate_concrete_servicer_stubs:{ROOT}"]
    command += [f"{PACKAGE}/{name}" for name in FILES]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
