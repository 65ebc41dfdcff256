"""The errors the framework raises on purpose, each with the exit code the command line ends with."""

from __future__ import annotations


class LockstepError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the command line ends with."""

    exit_code = 1


class ConfigError(LockstepError, ValueError):
    """A setting is refused and nothing was started. The message gives the value, the rule and the cure."""

    exit_code = 2


class CheckFailed(LockstepError):
    """A check stopped the run: a non-finite value, replicas that differ, a replay that differs."""

    exit_code = 3


class PeerLost(LockstepError):
    """Another worker was lost or hangs: restarting from the last checkpoint is right."""

    exit_code = 4


class Preempted(LockstepError):
    """The run was asked to stop and saved a checkpoint: restarting is right."""

    exit_code = 5
