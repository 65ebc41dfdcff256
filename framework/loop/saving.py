"""Checkpoints of a run: what is in one, when the best is saved, and the restore at the start."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.checkpoint import find, manifest, restore
from framework.checkpoint.find import Found
from framework.checkpoint.manifest import Damaged, Manifest
from framework.checkpoint.names import variable_names
from framework.checkpoint.store import CheckpointStore
from framework.cluster.agree import exchange
from framework.errors import ConfigError, LockstepError
from framework.loop import changes, files
from framework.loop.feed import Position
from framework.loop.folder import RunFolder
from framework.parse import parse_best, parse_patterns

if TYPE_CHECKING:
    from framework.loop.trainer import Trainer

_MODEL = "model/"  # before the names of the model's variables in a checkpoint
_LONGEST = 1000  # characters of a refusal that is told to the other workers


class Saving:
    """Saves and restores a trainer's whole state: model, optimizers, step and position in the data.

    Args:
      trainer: whose state it is.
      folder: the run's folder; None: nothing is written.
    """

    def __init__(self, trainer: Trainer, folder: RunFolder | None):
        config = trainer.config
        self._trainer = trainer
        self._folder = folder
        self._best = parse_best(config.keep_best)
        self._saved_at = -1
        self._bare = False  # and that was before the evaluation of this step, so the checkpoint has no figures
        self._restored = False
        self._lines: list[str] = []  # for the chief to print
        self._changed = ""
        self.run_id = ""  # of the run in the folder; known to the chief after the restore
        self._store: CheckpointStore | None = None
        if folder is not None:
            self._store = CheckpointStore(
                folder=os.path.join(folder.path, find.CHECKPOINTS),
                keep=config.keep_checkpoints,
                every=config.keep_every,
                best=self._best,
                background=config.checkpoint_in_background,
            )

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        return self._store.latest() if self._store is not None else None

    def how_far(self) -> str:
        """The step reached and the step saved, for a message."""
        saved = self.latest
        return f"at step {self._trainer.step}; " + ("nothing is saved" if saved is None else f"step {saved} is saved")

    # --- the start -----------------------------------------------------------------------------------------------

    def restore(self, claim: Callable[[], bool], *, training: bool) -> list[str]:
        """Claims the folder and, once, reads the newest whole checkpoint, or the weights of ``init_from``.

        The chief decides which; all workers have to call this, and stop alike when one of them cannot follow.

        Args:
          claim: called by the chief; whether it may write to the folder.
          training: whether steps are to follow: then nothing may make it another run.

        Returns:
          Lines about it, for the chief to print.

        Raises:
          ConfigError: ``resume`` forbids what was found, it would be another run, or the checkpoint does not fit.
        """
        t = self._trainer
        if self._restored:
            if t.cluster.is_chief:
                claim()
            return []
        plan = self._agreed(lambda: self._decide(claim, training=training))
        self._restored = True
        if plan["kind"] == "resume":
            assert self._store is not None
            self._load(self._store.path(plan["step"]))
            line = f"going on from the checkpoint of step {t.step}, example {t.position.examples}"
            self._lines.append("; ".join([line, self._changed] if self._changed else [line]))
        elif plan["kind"] == "init":
            self._lines += self._load_initial()
        return self._lines

    def _decide(self, claim: Callable[[], bool], *, training: bool) -> dict[str, Any]:
        """The chief's decision: what to read, by step and checksum of the manifest. Only the chief calls this."""
        t, config, folder, store = self._trainer, self._trainer.config, self._folder, self._store
        found = Found(None, {})
        old: dict[str, Any] = {}
        if folder is not None and store is not None:
            writes = claim()
            old = folder.settings()
            self.run_id = store.run = str(old.get("run_id") or secrets.token_hex(4))
            if writes and (left := store.clean()):
                self._lines.append(f"removed what a killed run left half written: {', '.join(left)}")
            found = store.newest()
            _warn(store.folder, found.passed_over)
        where = f"run_dir={config.run_dir}"
        if found.manifest is None and found.passed_over:
            raise ConfigError(
                f"{where} has checkpoints but none is whole: {find.reasons(found)}; pass another --run_dir, or move "
                "them away to start from step 0"
            )
        if config.resume == "must" and found.manifest is None:
            raise ConfigError(f"resume=must but {where} has no checkpoint; pass --resume=auto")
        if config.resume == "never" and folder is not None and (there := folder.contents()):
            step = found.manifest.step if found.manifest else None
            has = f"a checkpoint of step {step}" if found.manifest else f"the files of a run ({', '.join(there)})"
            raise ConfigError(
                f"resume=never but {where} has {has}; pass another --run_dir, or --resume=auto to go on from it"
            )
        if found.manifest is not None:
            changed = ""
            if training:
                new = json.loads(files.as_json(files.settings(t, self.run_id)))  # as the old ones were read
                changed = changes.describe(old, new, str(config.run_dir), anyway=config.resume_anyway)
                changed = changed if old else "config.json is missing, so what changed is not known"
            self._changed = changed
            if config.init_from:
                self._lines.append(f"init_from={config.init_from} is not read: the run has weights of its own")
            return _plan("resume", found.manifest)
        if config.init_from:
            path, initial, passed_over = find.one_of(config.init_from)
            _warn(os.path.dirname(path), passed_over)
            return _plan("init", initial)
        return {"kind": "new"}

    def _agreed(self, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The chief's decision, on every worker; all have looked at what it names and found the same."""
        t = self._trainer
        if t.cluster.num_workers == 1:
            return decide()
        plan: dict[str, Any] = {}
        error: Exception | None = None
        if t.cluster.is_chief:
            try:
                plan = decide()
            except Exception as caught:  # whatever it is, the others must not wait for ever
                error, plan = caught, {"kind": "refused", "why": str(caught)[:_LONGEST]}
        texts = exchange(t.strategy, t.cluster, json.dumps(plan, ensure_ascii=False))
        if error is not None:
            raise error
        plan = json.loads(texts[0])
        if plan["kind"] == "refused":
            raise ConfigError(f"{plan['why']} (says worker 0)")
        if plan["kind"] in ("resume", "init"):
            wrong = "" if t.cluster.is_chief else self._look(plan)
            texts = [text for text in exchange(t.strategy, t.cluster, wrong[:_LONGEST]) if text]
            if texts:
                raise ConfigError("; ".join(texts))
        return plan

    def _look(self, plan: Mapping[str, Any]) -> str:
        """Why this worker cannot read what the chief decided on; empty: it can."""
        config, index = self._trainer.config, self._trainer.cluster.index
        path = config.init_from
        try:
            if plan["kind"] == "resume":
                assert self._store is not None
                path = self._store.path(plan["step"])
                there = manifest.check(path)
            else:
                path, there, _ = find.one_of(path)
        except (Damaged, ConfigError) as error:
            seen = str(error)
        else:
            seen = f"its manifest has the checksum {there.checksum}"
            if there.checksum == plan["checksum"]:
                return ""
        return (
            f"worker {index} does not see the checkpoint of step {plan['step']} that worker 0 goes on from (manifest "
            f"{plan['checksum']}): at {path}: {seen}. All workers must have the folder on one shared file system"
        )

    def _load(self, path: str) -> None:
        t, values = self._trainer, restore.read(path)
        counts = {n: int(values.pop(f"run/{n}", 0)) for n in ("step", "examples", "epoch", "batches")}
        # The position first: building the model may open the data.
        t.position = Position(counts["examples"], counts["epoch"], counts["batches"])
        t.advance(counts["step"] - t.step)
        restore.assign(t.state(), values, path)
        self._saved_at, self._bare = t.step, False

    def _load_initial(self) -> list[str]:
        """Loads the model's weights, or a part of them, from ``init_from``; returns lines that name them."""
        t, config = self._trainer, self._trainer.config
        path, found, _ = find.one_of(config.init_from)
        values = {n.removeprefix(_MODEL): v for n, v in restore.read(path).items() if n.startswith(_MODEL)}
        t.build()
        loaded = restore.assign_part(
            variable_names(t.model),
            values,
            path,
            include=parse_patterns("init_include", config.init_include),
            exclude=parse_patterns("init_exclude", config.init_exclude),
        )
        t.stepper.restart_average()
        return loaded.describe(path, found.step)

    def read(self, step: int) -> None:
        """Reads the checkpoint of ``step``, whatever ``resume`` says.

        Raises:
          LockstepError: it cannot be read; ConfigError: it does not fit.
        """
        assert self._store is not None
        self._load(self._store.path(step))

    def go_back(self) -> int:
        """Reads the newest whole checkpoint again, after training has begun; returns its step.

        Raises:
          LockstepError: there is none.
        """
        self.wait()
        found = self._store.newest() if self._store is not None else Found(None, {})
        if found.manifest is None or self._store is None:
            raise LockstepError("there is no checkpoint to go back to")
        _warn(self._store.folder, found.passed_over)
        self._load(self._store.path(found.manifest.step))
        return self._trainer.step

    # --- while it runs -------------------------------------------------------------------------------------------

    def save(self, figures: Mapping[str, float]) -> None:
        """Saves the present step, if that has not been done; ``figures`` of the evaluation of this step, if any.

        It is saved once more if figures come after it: ``keep_best`` goes by those in the checkpoint.
        """
        t = self._trainer
        if self._saved_at == t.step and not (self._bare and figures):
            return
        self._saved_at, self._bare = t.step, not figures
        if self._store is None or self._folder is None or not t.cluster.is_chief:
            return
        self._folder.check_there()
        self._store.wait()  # before the variables are read: one snapshot in memory, not two
        tensors: dict[str, Any] = {n: v.read_value() for n, v in t.state().items()}
        p = t.position
        counts = {"step": t.step, "examples": p.examples, "epoch": p.epoch, "batches": p.batches}
        tensors.update({f"run/{n}": np.int64(v) for n, v in counts.items()})
        self._store.save(t.step, tensors, figures)

    def save_if_best(self, figures: Mapping[str, float]) -> None:
        """Saves the present step if its evaluation is the best so far."""
        if self._store is not None and self._best and self._trainer.step and self._store.would_be_best(figures):
            self.save(figures)

    def check_best(self, known: list[str]) -> None:
        """Refuses, before training, a best metric that no evaluation gives; ``known`` are the scalars there are."""
        if self._best and self._best[0] not in known:
            asked = f"keep_best={self._trainer.config.keep_best}"
            if not known:
                raise ConfigError(f"{asked} without evaluation; leave it out, or write eval_data")
            raise ConfigError(f"{asked} but the evaluation gives the scalars {', '.join(known)}; name one of these")

    def check(self) -> None:
        """Raises the error of a background save that failed."""
        if self._store is not None:
            self._store.check()

    def wait(self) -> None:
        """Waits for a background save, and raises its error."""
        if self._store is not None:
            self._store.wait()

    def finish(self) -> None:
        """Waits until the last save is on the disk, on all workers: a launcher may end all when one has ended.

        Raises:
          LockstepError: it failed; on all workers alike.
        """
        t = self._trainer
        if t.cluster.num_workers == 1:
            self.wait()
            return
        failed: LockstepError | None = None
        try:
            self.wait()
        except LockstepError as error:
            failed = error
        texts = exchange(t.strategy, t.cluster, str(failed)[:_LONGEST] if failed else "")
        if failed is not None:
            raise failed
        if texts[0]:
            raise LockstepError(f"worker 0: {texts[0]}")


def _plan(kind: str, found: Manifest) -> dict[str, Any]:
    return {"kind": kind, "step": found.step, "checksum": found.checksum}


def _warn(folder: str, passed_over: Mapping[int, str]) -> None:
    """Names checkpoints that are not whole; also where progress is off: something happened to the disk."""
    for step, reason in passed_over.items():
        print(f"warning: passed over the checkpoint {os.path.join(folder, find.name_of(step))}: {reason}", flush=True)
