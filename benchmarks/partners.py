"""Further processes of a contender that takes several: they are started by the first, and end with it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from benchmarks.process import ROOT


def free_ports(count: int) -> list[int]:
    """Ports of this machine that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def start(module: str, spec: Mapping[str, Any], **environment: str) -> None:
    """Starts ``python -m MODULE SPEC``; its standard input ends with this process."""
    subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(spec)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


def end_with_first() -> None:
    """Ends this process as soon as the one that started it is gone; call it in a partner."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
