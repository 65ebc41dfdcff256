"""A tf.data service: ``python -m input_pipelines.service [--workers=2] [--port=0] [--host=localhost]``.

It prints the dispatcher's address, for ``--data_service``, and serves until it is interrupted. TensorFlow listens on
all addresses of the machine and asks nobody for a password, so run it only inside a network that you trust.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any


class LocalService:
    """A dispatcher and its workers in this process, until the end of the ``with`` block.

    Args:
      workers: servers that make elements; at least 1.
      port: of the dispatcher; 0: any free one.
      host: name under which trainers reach this machine.

    Attributes:
      address: ``host:port`` of the dispatcher.
    """

    def __init__(self, workers: int = 1, port: int = 0, host: str = "localhost"):
        import tensorflow as tf

        service = tf.data.experimental.service
        self._dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
        number = self._dispatcher.target.rpartition(":")[2]
        self.address = f"{host}:{number}"
        config = service.WorkerConfig(dispatcher_address=f"localhost:{number}", worker_address=f"{host}:%port%")
        self._workers: list[Any] = [service.WorkerServer(config) for _ in range(workers)]

    def __enter__(self) -> LocalService:
        return self

    def __exit__(self, *_: object) -> None:
        # In this order: a worker that has lost its dispatcher would look for it until it is stopped itself.
        self._workers.clear()
        del self._dispatcher


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m input_pipelines.service", description="A tf.data service.")
    parser.add_argument("--workers", type=int, default=1, help="servers that make elements")
    parser.add_argument("--port", type=int, default=0, help="of the dispatcher; 0: any free one")
    parser.add_argument("--host", default="localhost", help="name under which trainers reach this machine")
    args = parser.parse_args(argv)
    if args.workers < 1 or not 0 <= args.port < 65536:
        parser.error(f"--workers={args.workers} --port={args.port} but workers must be at least 1 and port below 65536")
    over = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        over.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with LocalService(args.workers, args.port, args.host) as service:
        print(f"serving; pass --data_service={service.address}", flush=True)
        over.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
