"""Clusters of an indexed Job of Kubernetes, well formed and not. The long form of the generated cases: ``-m slow``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import RunConfig
from framework.cluster.cluster import Cluster, resolve
from framework.cluster.kubernetes import WORKERS_SAMPLE
from framework.errors import ConfigError

PATTERN = WORKERS_SAMPLE.removeprefix("--workers=")
PODS = tuple(f"digits-workers-0-{i}.digits:2222" for i in range(4))


def from_kubernetes(index: str | None, workers: str = PATTERN, **environ: str) -> Cluster:
    environ = environ if index is None else {**environ, "JOB_COMPLETION_INDEX": index}
    return resolve(RunConfig(cluster="kubernetes", workers=workers), environ)


def test_a_pod_finds_its_peers_by_the_pattern() -> None:
    assert from_kubernetes("2") == Cluster(PODS, 2, "Kubernetes")
    assert from_kubernetes("0").is_chief
    assert from_kubernetes("1", "a:1,b:1").workers == ("a:1", "b:1")


def test_kubeflow_sets_tf_config() -> None:
    value = {
        "cluster": {"chief": ["c.ns.svc:2222"], "worker": ["w.ns.svc:2222"]},
        "task": {"type": "worker", "index": 0},
    }
    environ = {"TF_CONFIG": json.dumps(value), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    expected = Cluster(("c.ns.svc:2222", "w.ns.svc:2222"), 1, "TF_CONFIG")
    assert resolve(RunConfig(), environ) == expected
    assert resolve(RunConfig(cluster="kubernetes"), environ) == expected


def test_a_pod_of_a_sweep_is_alone() -> None:
    assert resolve(RunConfig(), {"JOB_COMPLETION_INDEX": "3"}) == Cluster()


@pytest.mark.parametrize(
    ("index", "workers", "said"),
    [
        (None, PATTERN, "JOB_COMPLETION_INDEX is not set"),
        ("4", PATTERN, "JOB_COMPLETION_INDEX=4 but workers names 4"),
        ("-1", PATTERN, "JOB_COMPLETION_INDEX='-1'"),
        ("x", PATTERN, "JOB_COMPLETION_INDEX='x'"),
        ("0", "digits-[0-3.digits:2222", "workers='digits-[0-3.digits:2222'"),
        ("0", "digits-[0-3].digits", "'digits-0.digits'"),
        ("0", "a:1,a:1", "'a:1' twice"),
        ("0", "a[1-2]:70000", "port 70000"),
        ("0", "", "cluster=kubernetes without workers"),
    ],
)
def test_what_does_not_fit_is_refused_with_key_and_sample(index: str | None, workers: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_kubernetes(index, workers)
    message = str(caught.value)
    assert said in message and WORKERS_SAMPLE in message and "\n" not in message


def test_settings_that_contradict() -> None:
    with pytest.raises(ConfigError, match="worker_index=1: give both"):
        RunConfig(cluster="kubernetes", workers="a:1", worker_index=1)
    with pytest.raises(ConfigError, match="cluster=slurm with workers='a:1'"):
        RunConfig(cluster="slurm", workers="a:1", worker_index=0)


_workers = st.lists(st.sampled_from([*"0123456789[],-:. wn", "[0-3]", ":2222", "a:1", "9" * 30]), max_size=8).map(
    "".join
)


@pytest.mark.parametrize(
    "examples", [pytest.param(150, id="short"), pytest.param(8000, id="long", marks=pytest.mark.slow)]
)
def test_any_settings_give_a_cluster_or_a_config_error(examples: int) -> None:
    index: Any = st.none() | st.integers(-2, 5).map(str) | st.text(st.characters(codec="utf-8"), max_size=6)

    @settings(max_examples=examples, deadline=None, database=None)
    @given(index=index, workers=_workers | st.just(PATTERN))
    def check(index: str | None, workers: str) -> None:
        try:
            cluster = from_kubernetes(index, workers)
        except ConfigError as error:
            assert "JOB_COMPLETION_INDEX" in str(error) or "workers" in str(error)
            assert "for example" in str(error) and "\n" not in str(error)
            return
        assert cluster.index == int(index or "-1") and cluster.index < len(cluster.workers)
        assert len(set(cluster.workers)) == len(cluster.workers)
        assert all(0 < int(address.rpartition(":")[2]) < 65536 for address in cluster.workers)

    check()
