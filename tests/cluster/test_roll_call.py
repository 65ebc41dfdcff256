"""Workers meet before TensorFlow's servers start: threads stand for processes, on real sockets of this machine."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import train
from framework import RunConfig
from framework.cluster import roll_call as module
from framework.cluster import strategy
from framework.cluster.addresses import Cluster
from framework.cluster.roll_call import PortTaken, roll_call, taken_mark
from framework.errors import ConfigError, LockstepError, PeerLost


def meet(clusters: list[Cluster], limit: float) -> list[BaseException | None]:
    """What came of the roll call for each of the workers that came."""
    ends: list[BaseException | None] = [AssertionError("it did not end")] * len(clusters)

    def one(place: int) -> None:
        try:
            roll_call(clusters[place], limit, say=lambda line: None)
            ends[place] = None
        except LockstepError as error:
            ends[place] = error

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(clusters))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit + 10)
    return ends


@pytest.fixture
def addresses(free_ports: Callable[[int], list[int]]) -> Callable[[int], tuple[str, ...]]:
    return lambda count: tuple(f"127.0.0.1:{port}" for port in free_ports(count))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_go_when_all_are_there(count: int, addresses: Callable[[int], tuple[str, ...]]) -> None:
    workers = addresses(count)
    start = time.monotonic()
    assert meet([Cluster(workers, i) for i in range(count)], 30) == [None] * count
    assert time.monotonic() - start < 10
    for address in workers:  # and the ports are free again for TensorFlow's servers
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            pass


def test_ipv6_addresses(free_ports: Callable[[int], list[int]]) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    workers = tuple(f"[::1]:{port}" for port in free_ports(2))
    assert meet([Cluster(workers, i) for i in range(2)], 30) == [None, None]


def test_c092_those_who_came_name_those_who_did_not(addresses: Callable[[int], tuple[str, ...]]) -> None:
    workers = addresses(4)
    ends: list[Any] = []
    early = threading.Thread(target=lambda: ends.extend(meet([Cluster(workers, 2)], 1.0)))
    early.start()
    time.sleep(0.5)  # it came first, but worker 0 is the one that ends the wait
    ends.extend(meet([Cluster(workers, 0)], 1.0))
    early.join(20)
    assert len(ends) == 2
    for error in ends:
        assert isinstance(error, PeerLost) and error.exit_code == 4
        assert f"worker 1 ({workers[1]}), worker 3 ({workers[3]}) did not come within 1 s" in str(error)


def test_c092_worker_0_is_missed_by_the_others(addresses: Callable[[int], tuple[str, ...]]) -> None:
    workers = addresses(2)
    (error,) = meet([Cluster(workers, 1)], 0.5)
    assert isinstance(error, PeerLost) and f"worker 0 ({workers[0]}) did not come" in str(error)


def test_c092_without_a_limit_a_line_names_them_now_and_then(addresses: Callable[[int], tuple[str, ...]]) -> None:
    workers = addresses(2)
    ticks, lines = itertools.count(0.0, 5.0), []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        roll_call(Cluster(workers, 0), 0.0, say=say, clock=lambda: next(ticks))
    assert lines == [
        f"waiting for worker 1 ({workers[1]}); 10 s so far",
        f"waiting for worker 1 ({workers[1]}); 40 s so far",
    ]


def test_a_worker_that_was_told_of_other_workers_is_refused(addresses: Callable[[int], tuple[str, ...]]) -> None:
    workers = addresses(3)
    first, second = meet([Cluster(workers, 0), Cluster(workers[:2], 1)], 1.0)
    assert isinstance(first, PeerLost)
    assert isinstance(second, ConfigError) and "worker 0 knows of 3 workers but worker 1 of 2" in str(second)


def test_something_else_at_the_address_of_worker_0_is_told(addresses: Callable[[int], tuple[str, ...]]) -> None:
    workers = addresses(2)

    def stranger(server: socket.socket) -> None:
        while True:
            try:
                with server.accept()[0] as connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            except OSError:
                return

    with socket.create_server(("127.0.0.1", int(workers[0].rpartition(":")[2]))) as server:
        threading.Thread(target=stranger, args=(server,), daemon=True).start()
        (error,) = meet([Cluster(workers, 1)], 1.0)
        server.shutdown(socket.SHUT_RDWR)
    assert isinstance(error, PeerLost) and "what answers at its address says 'HTTP/1.1 400" in str(error)


def test_strangers_at_the_door_of_worker_0_keep_nobody_out(addresses: Callable[[int], tuple[str, ...]]) -> None:
    workers = addresses(2)
    port = int(workers[0].rpartition(":")[2])
    said = [b"GET / HTTP/1.1\r\n\r\n", b"lockstep 1 x y\n", b"\xff\xfe\n", b"lockstep 1 " + b"9" * 5000 + b" 2\n", b""]
    ends: list[Any] = []
    waiting = threading.Thread(target=lambda: ends.append(meet([Cluster(workers, 0)], 20)), daemon=True)
    waiting.start()
    for words in said:
        for _ in range(100):
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=1)
                break
            except OSError:
                time.sleep(0.02)
        with connection:
            connection.sendall(words)
    assert meet([Cluster(workers, 1)], 20) == [None]
    waiting.join(20)
    assert ends == [[None]]


@pytest.mark.parametrize("listening", [True, False])
def test_c095_a_port_that_is_taken_is_named_at_once(
    listening: bool, addresses: Callable[[int], tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TELL", 0.2)  # worker 0 is not there
    workers = addresses(2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(workers[1].rpartition(":")[2])))
        if listening:
            other.listen()
        start = time.monotonic()
        with pytest.raises(PortTaken, match=taken_mark(workers[1])) as caught:
            roll_call(Cluster(workers, 1), 30)
    assert time.monotonic() - start < 2 and caught.value.exit_code == 2


def test_c095_all_end_when_the_port_of_one_is_taken(addresses: Callable[[int], tuple[str, ...]]) -> None:
    workers = addresses(3)
    start = time.monotonic()
    with socket.create_server(("127.0.0.1", int(workers[1].rpartition(":")[2]))):
        first, second, third = meet([Cluster(workers, i) for i in range(3)], 0.0)
    assert isinstance(second, PortTaken)
    assert isinstance(first, PeerLost) and f"worker 1 ({workers[1]}) cannot start: its address is taken" in str(first)
    assert isinstance(third, PeerLost)
    assert time.monotonic() - start < 9


@pytest.mark.parametrize(("answer", "said"), [(b"SSH-2.0\n", "says 'SSH-2.0'"), (b"", "says nothing")])
def test_c095_another_program_at_the_address_of_worker_0_ends_the_wait(
    answer: bytes, said: str, addresses: Callable[[int], tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STRANGER", 0.5)
    monkeypatch.setattr(module, "_SILENT", 0.3)
    workers = addresses(2)
    kept: list[socket.socket] = []

    def stranger(server: socket.socket) -> None:
        while True:
            try:
                kept.append(server.accept()[0])
                kept[-1].sendall(answer)
            except OSError:
                return

    with socket.create_server(("127.0.0.1", int(workers[0].rpartition(":")[2]))) as server:
        threading.Thread(target=stranger, args=(server,), daemon=True).start()
        (error,) = meet([Cluster(workers, 1)], 0.0)
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()
    assert isinstance(error, PeerLost) and f"worker 0 ({workers[0]}) is not there" in str(error) and said in str(error)


# --- as a user sees it ---------------------------------------------------------------------------------------------


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...], index: int) -> int:
    value = {"cluster": {"worker": list(workers)}, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(value))
    args = ["--task=digits", "--device=cpu", f"--run_dir={tmp_path / 'run'}", "--collective_timeout=0.5"]
    return train.main(["train.py", *args])


def test_c092_the_command_line_ends_with_4_and_names_the_missing_peer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    addresses: Callable[[int], tuple[str, ...]],
) -> None:
    workers = addresses(2)
    assert run(tmp_path, monkeypatch, workers, 0) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: worker 1 ({workers[1]}) did not come within 0.5 s")
    assert not (tmp_path / "run").exists()


def test_c095_the_command_line_ends_with_2_and_names_the_address(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    addresses: Callable[[int], tuple[str, ...]],
) -> None:
    monkeypatch.setattr(module, "_TELL", 0.2)
    workers = addresses(2)
    with socket.create_server(("127.0.0.1", int(workers[1].rpartition(":")[2]))):
        assert run(tmp_path, monkeypatch, workers, 1) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: the address {workers[1]} is taken")


def test_c094_a_cluster_after_the_first_op_is_refused_with_the_cure(
    addresses: Callable[[int], tuple[str, ...]],
) -> None:
    tf.zeros([1])  # what a user's script did at import
    cluster = Cluster(addresses(1), 0, "TF_CONFIG")
    config = RunConfig(device="cpu", num_replicas=1)
    with pytest.raises(ConfigError, match="must be made before TensorFlow's first op; make the Trainer first"):
        strategy.build(strategy.choose(config, cluster, 0, False), config, cluster)
