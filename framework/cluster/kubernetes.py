"""Who takes part in an indexed Job or a JobSet of Kubernetes: hosts by a pattern, the index from the environment."""

from __future__ import annotations

from collections.abc import Mapping

from framework.cluster.addresses import Cluster, check_addresses, expand, short, whole_number
from framework.errors import ConfigError

SOURCE = "Kubernetes"
INDEX = "JOB_COMPLETION_INDEX"
WORKERS_SAMPLE = "--workers=digits-workers-0-[0-3].digits:2222"
_SAMPLE = f"{INDEX}=0 with --cluster=kubernetes {WORKERS_SAMPLE}"


def from_kubernetes(workers: str, environ: Mapping[str, str]) -> Cluster:
    """One worker for each index of the Job.

    Args:
      workers: ``host:port`` of each, digits in brackets stand for several: ``name-[0-3].service:2222``; so it gives the
        names as well as their number.
      environ: ``JOB_COMPLETION_INDEX`` is read, which Kubernetes sets where ``completionMode`` is ``Indexed``.

    Raises:
      ConfigError: something is missing or malformed, or the index does not fit the number of workers.
    """
    addresses = addresses_of(workers, WORKERS_SAMPLE)
    text = environ.get(INDEX, "").strip()
    if not text:
        raise ConfigError(
            f"cluster=kubernetes but {INDEX} is not set: the Job needs completionMode: Indexed; for example {_SAMPLE}"
        )
    index = whole_number(text)
    if index is None:
        raise ConfigError(f"{INDEX}={short(text)} but it must be a whole number; for example {_SAMPLE}")
    if index >= len(addresses):
        raise ConfigError(
            f"{INDEX}={index} but workers names {len(addresses)}: it must name as many as the Job has completions; for "
            f"example {_SAMPLE}"
        )
    return Cluster(addresses, index, SOURCE)


def addresses_of(workers: str, sample: str) -> tuple[str, ...]:
    """The addresses that the flag ``--workers`` names; ConfigError, with ``sample``, if it is malformed."""

    def refuse(what: str) -> ConfigError:
        return ConfigError(f"workers={short(workers)}: {what}; for example {sample}")

    addresses = tuple(expand(workers, refuse))
    check_addresses(addresses, "workers", sample)
    return addresses
