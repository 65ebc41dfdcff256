"""A worker that is lost while the others train: TensorFlow's error in the words of the run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from framework.cluster.addresses import Cluster
from framework.errors import PeerLost

_TASK = re.compile(r"/task:(\d+)")


@contextlib.contextmanager
def as_peer_lost(cluster: Cluster, where: Callable[[], str], blame: Callable[[], str]) -> Iterator[None]:
    """Raises PeerLost for the errors by which TensorFlow says, inside the block, that another worker does not answer.

    Args:
      cluster: with one worker nothing is changed.
      where: says how far the run has come; for the message.
      blame: says which workers ended or fell silent; empty: nothing is known but what TensorFlow says.
    """
    import tensorflow as tf

    errors = tf.errors
    try:
        yield
    except (errors.UnavailableError, errors.DeadlineExceededError, errors.AbortedError, errors.CancelledError) as error:
        if cluster.num_workers == 1:
            raise
        raise PeerLost(
            f"{blame() or _who(cluster, str(error))}; this worker was {where()}; start all workers again: "
            f"{_first_line(error)}"
        ) from error


def _who(cluster: Cluster, text: str) -> str:
    """The workers that the error names, without this one."""
    named = sorted({int(i) for i in _TASK.findall(text)} - {cluster.index})
    lost = [f"worker {i} ({cluster.workers[i]})" for i in named if i < cluster.num_workers]
    if not lost and cluster.num_workers == 2:
        lost = [f"worker {1 - cluster.index} ({cluster.workers[1 - cluster.index]})"]
    if not lost:
        return "another worker is lost or hangs, and TensorFlow does not say which,"
    return f"{' and '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost or hang{'s' * (len(lost) == 1)}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith(("Graph execution error", "Detected at node", 'File "'))]
    return (useful or lines or [type(error).__name__])[0][:300]
