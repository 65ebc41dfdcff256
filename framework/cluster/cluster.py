"""Which workers take part: from TF_CONFIG, Slurm, Kubernetes or flags, to one value that is printed and stored."""

from __future__ import annotations

import os
from collections.abc import Mapping

from framework.cluster import kubernetes, slurm
from framework.cluster.addresses import Cluster as Cluster
from framework.cluster.tf_config import SAMPLE as SAMPLE
from framework.cluster.tf_config import from_tf_config
from framework.config import RunConfig
from framework.errors import ConfigError


def resolve(config: RunConfig, environ: Mapping[str, str] | None = None) -> Cluster:
    """Returns the cluster that flags and environment describe.

    ``cluster=auto`` takes the first that is there: ``workers``, ``TF_CONFIG``, a step of several tasks that Slurm's
    srun started; else this process is alone.

    Args:
      config: ``cluster``, ``workers``, ``worker_index`` and ``worker_port`` are read.
      environ: the environment, ``os.environ`` if None.

    Raises:
      ConfigError: a setting is malformed; the message has the offending key and a correct sample.
    """
    cluster = _resolve(config, os.environ if environ is None else environ)
    if config.worker_port and cluster.source != slurm.SOURCE:
        raise ConfigError(
            f"worker_port={config.worker_port} but the cluster comes from {cluster.source}: only under Slurm ports are "
            "chosen; leave it out, or for example --cluster=slurm --worker_port=12345"
        )
    return cluster


def _resolve(config: RunConfig, environ: Mapping[str, str]) -> Cluster:
    text = environ.get("TF_CONFIG", "").strip()
    if config.cluster == "kubernetes" and (config.workers or not text):
        if not config.workers:
            raise ConfigError(
                "cluster=kubernetes without workers, and TF_CONFIG is not set; for example --cluster=kubernetes "
                f"{kubernetes.WORKERS_SAMPLE}"
            )
        return kubernetes.from_kubernetes(config.workers, environ)
    if config.workers:
        return _from_flags(config)
    if config.cluster == "none":
        return Cluster()
    if config.cluster == "slurm":
        return slurm.from_slurm(environ, config.worker_port)
    cluster = from_tf_config(text) if text else Cluster()
    if config.cluster in ("tf_config", "kubernetes") and not cluster.workers:
        what = "names no worker" if text else "is not set"
        raise ConfigError(f"cluster={config.cluster} but TF_CONFIG {what}; for example TF_CONFIG='{SAMPLE}'")
    if not text and config.cluster == "auto" and slurm.in_step(environ):
        return slurm.from_slurm(environ, config.worker_port)
    return cluster


def _from_flags(config: RunConfig) -> Cluster:
    workers = kubernetes.addresses_of(config.workers, "--workers=host1:2222,host2:2222")
    index = config.worker_index
    assert index is not None  # RunConfig refuses workers without an index
    if index >= len(workers):
        raise ConfigError(
            f"worker_index={index} but workers names {len(workers)}; indices run from 0 to {len(workers) - 1}"
        )
    return Cluster(workers, index, "flags")
