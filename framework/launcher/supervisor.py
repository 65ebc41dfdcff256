"""When a gang that failed is started again, and when not."""

from __future__ import annotations

from collections.abc import Callable

from framework.launcher.gang import Outcome

NO_PROGRESS = 6  # exit code: restarting does not help
_STRIKES = 3  # restarts without a newer checkpoint
_PORT_TRIES = 5  # starts with new ports, which count as no restart
_LONGEST_PAUSE = 60.0  # seconds
_NEVER = {2: "the configuration is refused", 3: "a check stopped the run", NO_PROGRESS: "no progress"}


def supervise(
    attempt: Callable[[], Outcome],
    *,
    max_restarts: int,
    newest_step: Callable[[], int | None],
    backoff: float,
    pause: Callable[[float], None],
    stopped: Callable[[], bool],
    say: Callable[[str], None],
) -> int:
    """Runs attempts until one is done, or another makes no sense, and returns the exit code.

    Codes 2, 3 and 6 are final. After any other failure the gang is started again, at most ``max_restarts`` times, with
    a pause that doubles with each restart in a row that brought no newer checkpoint; the third such restart ends all.

    Args:
      attempt: starts all workers and returns how it ended.
      max_restarts: 0: never.
      newest_step: step of the newest checkpoint; -1: there is none; None: not known, so progress is not looked at.
      backoff: seconds of the first pause.
      pause: waits so many seconds, less when a signal comes.
      stopped: whether a signal asks the launcher to end.
      say: takes a line for people.

    Returns:
      The code of the worker that tells most; 6: three restarts in a row without a newer checkpoint.
    """
    restarts = strikes = tries = 0
    best = newest_step()
    while True:
        outcome = attempt()
        if not outcome.code:
            return 0
        who = f"worker {outcome.worker} ended with code {outcome.code}"
        if stopped():
            say(f"{who} after a signal")
            return outcome.code
        if outcome.marked and outcome.code == 2 and tries < _PORT_TRIES:
            tries += 1
            say(f"{who}: its port was taken; starting again with other ports")
            continue
        if outcome.code in _NEVER:
            say(f"{who}: {_NEVER[outcome.code]}, so it is not started again")
            return outcome.code
        step = newest_step()
        if step is not None and best is not None:
            strikes = 0 if step > best else strikes + (restarts > 0)
            best = max(step, best)
            if strikes >= _STRIKES:
                where = f"step {step}" if step >= 0 else "no checkpoint at all"
                say(f"{who}: {strikes} restarts in a row went no further than {where}; ending with {NO_PROGRESS}")
                return NO_PROGRESS
        if restarts >= max_restarts:
            say(f"{who}" + (f"; all {max_restarts} restarts are used" if max_restarts else ""))
            return outcome.code
        restarts += 1
        seconds = min(backoff * 2.0 ** min(strikes, 10), _LONGEST_PAUSE)
        at = "" if step is None else f" from step {max(step, 0)}"
        say(f"{who}; restart {restarts} of {max_restarts}{at} in {seconds:g} s")
        pause(seconds)
        if stopped():
            return outcome.code
