"""The outer loop: inner loops cut at the next interval of any hook, records, checkpoints, a clean end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from framework.cluster.agree import exchange
from framework.cluster.lost import as_peer_lost
from framework.cluster.preflight import differences
from framework.errors import ConfigError, LockstepError, Preempted
from framework.hooks import EveryNSteps, Hook, Never, Scheduled, Trigger
from framework.hooks.early_stop import check_condition
from framework.loop import files
from framework.loop.alarms import Alarms
from framework.loop.evaluate import Evaluation, flat
from framework.loop.feed import Feed
from framework.loop.folder import RunFolder
from framework.loop.lengths import Lengths
from framework.loop.loop import CompiledLoop, LoopResult
from framework.loop.reports import Reports
from framework.loop.saving import Saving
from framework.loop.signals import StopSignals
from framework.loop.source import Source
from framework.loop.window import Window
from framework.monitor import gradient_outliers
from framework.monitor.ledger import Ledger, sentence, summed
from framework.monitor.replica_check import ReplicaCheck
from framework.monitor.watch import Watch
from framework.monitor.watchdog import Watchdog

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer


class Run:
    """One trainer's run: where it stands, its files, and the loop over steps."""

    def __init__(self, trainer: Trainer):
        config = trainer.config
        self._folder = RunFolder(config.run_dir) if config.run_dir else None
        self._trainer = trainer
        self.reports = Reports(trainer, self._folder)
        self._loop = self._make_loop()
        self._evaluation = Evaluation(trainer)
        self.source = Source(trainer)
        self.saving = Saving(trainer, self._folder)
        self.alarms = Alarms(trainer)
        self._trained = False
        self._signals = StopSignals(config.max_minutes)
        tell = trainer.stepper.ask_for if trainer.cluster.num_workers > 1 else None
        self._lengths = Lengths(config.steps_per_loop, tell)
        self.ledger = Ledger()
        self._watchdog = Watchdog(
            ledger=self.ledger,
            cluster=trainer.cluster,
            run_dir=config.run_dir,
            hang_limit=config.hang_limit,
            tell=self.reports.say,
            last_words=lambda reason: self._summarise("failed", reason),
        )
        self._replicas = ReplicaCheck(trainer, self.ledger)
        self._watch = Watch(trainer=trainer, ledger=self.ledger, reports=self.reports, graph=lambda: self._loop.graph())
        self._evaluated_at = -1
        self._lost_until = 0  # the step that an earlier process of this run had reached
        self._skipped = 0
        self._hooks: list[Scheduled] = []

    def _make_loop(self) -> CompiledLoop:
        t = self._trainer
        return CompiledLoop(
            strategy=t.strategy,
            replica_step=self._replica_step,
            stop_on_alarm=t.config.on_nonfinite != "skip",
            timed=not t.config.deterministic,
            stamped=t.stepper.stamped,
            logged=gradient_outliers.wanted(t),
        )

    def _replica_step(self, batch: Any, step: tf.Tensor) -> Any:
        with self.reports.summaries(step):
            return self._trainer.stepper.train(batch, step)

    def any_feed(self) -> Feed:
        """A feed of the training data, or of evaluation data where there is no other, for its element spec."""
        if self._has_train_data:
            return self.source.open(None)
        feed = self._evaluation.first_feed()
        if feed is None:
            raise ConfigError(f"{type(self._trainer).__name__} has neither training nor evaluation data")
        return feed

    @property
    def _has_train_data(self) -> bool:
        from framework.loop.trainer import Trainer

        return type(self._trainer).train_data is not Trainer.train_data

    # --- training ------------------------------------------------------------------------------------------------

    def train(self, steps: int | None, *, evaluate: bool) -> dict[str, float]:
        """See ``Trainer.train``."""
        with contextlib.ExitStack() as stack:
            if self._trained:
                self.source.ask_again()
            self._trained = True
            self._trainer.check_cluster()
            self._enter(stack, training=True)
            self.ledger.step = self._trainer.step
            return self._train(steps, evaluate=evaluate)

    def _train(self, steps: int | None, *, evaluate: bool) -> dict[str, float]:
        t, config = self._trainer, self._trainer.config
        if steps is None and config.train_steps is None and config.train_epochs is None:
            raise ConfigError("neither train_steps nor train_epochs is given; pass --train_steps=1000, or -1 for all")
        goal = self.source.total_steps if steps is None else t.step + steps
        if (goal is not None and t.step >= goal) or (steps is None and self.source.passes_done):
            self.reports.say(f"step {t.step} of {goal or t.step} is reached already: nothing is left to do")
            return {}
        with self._watchdog.watching():
            return self._train_to(goal, evaluate=evaluate, to_total=steps is None)

    def _train_to(self, goal: int | None, *, evaluate: bool, to_total: bool) -> dict[str, float]:
        t, config = self._trainer, self._trainer.config
        t.build()
        evaluate = evaluate and self._evaluation.exists
        if config.keep_best or config.stop_when:
            known = self._evaluation.figure_names() if evaluate else []
            self.saving.check_best(known)
            check_condition(config.stop_when, known)
        feed = self.source.open(goal)
        self._compare_data()
        self._hooks = list(t.hooks())
        # From here on files are written: what can be refused has been.
        self.reports.start(self.reports.writes)
        if self.reports.writes:
            self.reports.write_settings(self.saving.run_id)
        self._watchdog.write_heartbeats()
        self._lost_until = max((beat.step for beat in self._watchdog.earlier), default=0)
        hooks = [(s, Window()) for s in self._hooks]
        self._say_start(goal)
        status, reason = "failed", ""
        started: list[Any] = []
        try:
            lost = as_peer_lost(t.cluster, self.saving.how_far, self._watchdog.blame)
            with self._signals.listening(), lost, self._watch.running():
                for hook in [*self.reports.hooks(), *(s.hook for s, _ in hooks)]:
                    if isinstance(hook, Hook):
                        hook.begin(t)
                        started.append(hook)
                self.reports.ready_to_trace()
                status, reason = self._steps(goal, feed, hooks, evaluate, to_total)
                with self.ledger.timed("checkpoint"):
                    self.saving.finish()
        except BaseException as error:
            status = "failed"
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            with contextlib.suppress(LockstepError):  # the first error is the one to report
                self.saving.wait()
            raise
        finally:
            for hook in started:
                hook.end(t.step, status)
            self._summarise(status, reason)
        if reason:
            self.reports.say(reason)
        self.reports.say(sentence(self._seconds()))
        if status == "interrupted":
            raise KeyboardInterrupt
        if status == "preempted":
            raise Preempted(f"asked to stop at step {t.step}; the same command goes on from there")
        return self.reports.results

    def _compare_data(self) -> None:
        """Raises ConfigError, on all workers alike, if their data differ."""
        t = self._trainer
        if t.cluster.num_workers == 1 or t.config.mixed_workers:
            return
        texts = exchange(t.strategy, t.cluster, json.dumps(self.source.fingerprint()))
        table = differences({i: json.loads(text) for i, text in enumerate(texts)}, t.cluster)
        if table:
            raise ConfigError(table)

    def _steps(
        self, goal: int | None, feed: Feed, hooks: list[tuple[Scheduled, Window]], evaluate: bool, to_total: bool
    ) -> tuple[str, str]:
        """Runs steps until the goal, the end of the data, an early stop or a signal; returns status and reason."""
        t, config = self._trainer, self._trainer.config
        log_at, eval_at, save_at = (
            EveryNSteps(n) if n else Never()
            for n in (config.log_every, config.eval_every if evaluate else 0, config.checkpoint_every)
        )
        triggers = [log_at, eval_at, save_at, self._replicas.trigger, *(s.trigger for s, _ in hooks)]
        triggers += self._watch.triggers
        for trigger in triggers:
            trigger.begin(t.step, time.monotonic())
        log, status, reason, compiled = Window(), "done", "", False
        self._replicas.compare()  # what was just built or restored
        if config.on_nonfinite == "rollback":
            self._save()  # there must be something to go back to
        room = functools.partial(self._room, triggers, goal)
        while (goal is None or t.step < goal) and self.source.batches_left != 0:
            count = self._lengths.next(room, compiled=compiled)
            self.ledger.start()
            phase = "train" if compiled else "compile"
            with self.ledger.timed(phase, units=count), self._watch.profiler.marked(t.step + 1):
                result = self._loop(feed, t.step + 1, count)
            self._account(result, compiled)
            self._lengths.account(result, count, compiled=compiled)
            if self._folder is not None:
                self._folder.check_there()
            for window in (log, *(w for _, w in hooks)):
                window.add(result, timed=compiled)
            self._watch.add(result, compiled=compiled)
            if result.alarms:
                self.saving.wait()  # the message names the last checkpoint, which may still be being written
                self.reports.say(self.alarms.look(result, self.saving.latest))
            if result.failed:
                feed, log = self._go_back(goal), Window()
                for trigger in triggers:
                    trigger.begin(t.step, time.monotonic())
                continue
            if not compiled and result.steps:
                self._after_first_step(result)
                compiled = True
            if result.ended:
                again, reason = self.source.next_pass(goal, t.step, to_total=to_total)
                if again is None:
                    break
                feed = again
                if not result.steps:
                    continue
            now = time.monotonic()
            if self._replicas.trigger.fires(t.step, now) or t.step == goal:
                self._replicas.compare(unless_done=True)  # before anything is written of a state that may be wrong
            self._watch.at(t.step, now)
            if log_at.fires(t.step, now):
                self._record(log)
            for scheduled, window in hooks:
                if scheduled.trigger.fires(t.step, now):
                    scheduled.hook(t.step, window.figures(self._loop.layout))
                    window.clear()
            if eval_at.fires(t.step, now) or (evaluate and t.step == goal):
                self._evaluate_here()  # before the checkpoint of the same step, which keeps the figures
            if self.reports.stop_reason and t.step != goal:
                status, reason = "stopped_early", self.reports.stop_reason
                break
            if save_at.fires(t.step, now):
                self._save()
            self.saving.check()
            stop = self._signals.decide(t, result.asked)
            if stop is not None:
                status, reason = stop
                break
        if status not in ("interrupted", "preempted"):  # who asks to stop gets a checkpoint, and no more work
            self._replicas.compare(unless_done=True)
            self._watch.finish()
        if log.steps:
            self._record(log)
        if status == "done" and evaluate and self._evaluated_at != t.step:
            self._evaluate_here()
        self._save()
        return status, reason

    def _room(self, triggers: list[Trigger], goal: int | None, ahead: int) -> float:
        """Steps from ``ahead`` steps on to the next at which something is to be done, or nothing is left."""
        step, left = self._trainer.step + ahead, self.source.batches_left
        ends = [min(trigger.next_step(step) for trigger in triggers) - step]
        ends += [goal - step] if goal is not None else []
        return min([*ends, left - ahead] if left is not None else ends)

    def _account(self, result: LoopResult, compiled: bool) -> None:
        """Moves step and position by what was consumed, and books the time."""
        t = self._trainer
        t.advance(result.steps - int(result.failed))
        if result.steps:
            self.source.account(result)
        self._skipped += result.skipped
        self.ledger.step = t.step
        if compiled and result.steps:
            waited = 0.0 if math.isnan(result.waited) else result.waited
            self.ledger.move(waited, "train", "input_wait")
            lost = min(max(self._lost_until - (t.step - result.steps), 0), result.steps)
            self.ledger.move((result.seconds - waited) * lost / result.steps, "train", "again")

    def _go_back(self, goal: int | None) -> Feed:
        """Rollback: weights, slots and step of the last checkpoint, data from behind the step that failed."""
        position = dataclasses.replace(self._trainer.position)
        step = self.saving.go_back()
        self._trainer.position = position
        self.reports.undone()
        self.reports.say(f"went back to step {step}; the data goes on at example {position.examples}")
        return self.source.open(goal)

    def _after_first_step(self, result: LoopResult) -> None:
        self.reports.say(f"first step done after {result.seconds:.1f} s (tracing and compiling; not part of any rate)")
        if self.reports.writes:
            files.write_config(self._trainer, self.saving.run_id)  # again: the packs of the all-reduce are known now
        self.reports.graph(self._loop.graph())

    def _record(self, log: Window) -> None:
        figures = self._watch.with_rates(log.figures(self._loop.layout))
        log.clear()
        self.reports.record(figures, self._seconds())

    # --- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """See ``Trainer.evaluate``."""
        self._evaluation.check()
        with contextlib.ExitStack() as stack:
            writes = self._enter(stack, training=False)
            stack.enter_context(self._watchdog.watching())
            self._trainer.build()
            self.reports.start(writes)
            if writes and self._folder is not None and not self._folder.settings():
                self.reports.write_settings(self.saving.run_id)
            results = self._evaluate_here(writes=writes or not self.reports.writes)
            self.saving.wait()  # before the folder is free for others
            return flat(results, "")

    def export(self, directory: str, formats: Sequence[str]) -> str:
        """See ``Trainer.export``."""
        from framework.export import export

        t = self._trainer
        with contextlib.ExitStack() as stack:
            self._enter(stack, training=False)
            t.build()
            if not t.step and not t.config.init_from:
                raise ConfigError("an export of weights that were not trained; train first, or pass --run_dir of a run")
            if not directory:
                if not t.config.run_dir:
                    raise ConfigError("an export without a directory and without run_dir; pass --export_dir")
                directory = os.path.join(t.config.run_dir, "export", f"step-{t.step:08d}")
            if t.cluster.is_chief:
                export(t, directory, formats)
        return directory

    def follow(self) -> dict[str, float]:
        """See ``Trainer.evaluate_continuously``."""
        from framework.loop.follow import Follower

        self._trainer.build()
        return flat(Follower(self._trainer, self._evaluation, self.saving).run(), "")

    def _evaluate_here(self, *, writes: bool = True) -> dict[str, dict[str, float]]:
        """Evaluates and tells the hooks; without ``writes`` only those that write no file of the run."""
        t = self._trainer
        with self.ledger.timed("evaluate"):
            results = self._evaluation.run(self.ledger.beat)
        self._evaluated_at = t.step
        self.reports.results.update(flat(results, "eval/"))
        hooks = [*self.reports.hooks(writes=writes), *(s.hook for s in self._hooks if isinstance(s.hook, Hook))]
        for name, values in results.items():
            for hook in hooks:
                hook.evaluated(t.step, name, values)
        if writes:
            with self.ledger.timed("checkpoint"):
                self.saving.save_if_best(flat(results, ""))
        return results

    # --- files ---------------------------------------------------------------------------------------------------

    def _enter(self, stack: contextlib.ExitStack, *, training: bool) -> bool:
        """Takes the folder for this run, until the stack is left, and restores the first time.

        Returns:
          Whether this process writes files: the chief, unless an evaluation alone meets a run that is going on.
        """
        claimed: list[bool] = []

        def claim() -> bool:
            if self._folder is not None:
                claimed.append(stack.enter_context(self._folder.claim(required=training)))
            return bool(claimed and claimed[0])

        with self.ledger.timed("recovery"):
            lines = self.saving.restore(claim, training=training)
        if not self._trainer.step:  # there was nothing to go on from
            self.ledger.move(math.inf, "recovery", "start_up")
        for line in lines:
            self.reports.say(line)
        if claimed == [False]:
            self.reports.say(f"run_dir={self._trainer.config.run_dir} is in use or read-only: nothing is written to it")
        return self.reports.writes and claimed == [True]

    def _save(self) -> None:
        figures = {n[5:]: v for n, v in self.reports.results.items() if n.startswith("eval/")}
        with self.ledger.timed("checkpoint"):
            self.saving.save(figures if self._evaluated_at == self._trainer.step else {})

    def _seconds(self) -> dict[str, float]:
        """Seconds by phase of all processes of the run, this one and those before a restart."""
        return summed([*self._watchdog.earlier_seconds(), self.ledger.seconds()])

    def _summarise(self, status: str, reason: str) -> None:
        self.reports.write_summary(
            status,
            reason,
            seconds={k: round(v, 3) for k, v in self._seconds().items()},
            counts={
                "nonfinite_steps": self._skipped,
                "rollbacks": self.alarms.rollbacks,
                "restarts": len(self._watchdog.earlier),
                "throughput": self._watch.throughput.summary(),
            },
            checks={"finite": "every step", "replicas": self._replicas.summary(), **self._watch.summary()},
        )

    def _say_start(self, goal: int | None) -> None:
        t = self._trainer
        for line in t.describe():
            self.reports.say(line)
        self.reports.say(self.source.describe())
        self.reports.say(f"steps: {t.step} to {goal if goal is not None else 'the end of the data'}")
        for line in (self._replicas.describe(), self._watchdog.describe(), *self._watch.describe()):
            self.reports.say(line)

    # --- the rest ------------------------------------------------------------------------------------------------

    def forget_traces(self) -> None:
        """Makes the next step and the next evaluation trace again."""
        self._loop = self._make_loop()
        self._evaluation.forget_traces()
