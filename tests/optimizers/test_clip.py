"""Clipping by the global norm and then the update, through the step's own pieces, on 1, 2 and 3 replicas."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from framework.optimizers import LAMB, SGD, AdamW
from framework.step.gradients import StepSums
from framework.step.reduce import reduce
from framework.step.update import apply


def sgd(w, g, slots, t, rate, decay, excluded):
    return w - rate * g


def adamw(w, g, slots, t, rate, decay, excluded):
    slots["m"] = 0.9 * slots.get("m", 0.0) + 0.1 * g
    slots["v"] = 0.999 * slots.get("v", 0.0) + 0.001 * g * g
    step = np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * slots["m"] / (np.sqrt(slots["v"]) + 1e-7)
    return w - rate * decay * w - rate * step


def lamb(w, g, slots, t, rate, decay, excluded):
    slots["m"] = 0.9 * slots.get("m", 0.0) + 0.1 * g
    slots["v"] = 0.999 * slots.get("v", 0.0) + 0.001 * g * g
    step = slots["m"] / (1 - 0.9**t) / (np.sqrt(slots["v"] / (1 - 0.999**t)) + 1e-6) + decay * w
    return w - rate * np.linalg.norm(w) / np.linalg.norm(step) * step


CASES = {
    "sgd": (lambda: SGD(learning_rate=0.125), sgd, 0.0),
    "adamw": (lambda: AdamW(learning_rate=0.125, weight_decay=0.3), adamw, 0.3),
    "lamb": (lambda: LAMB(learning_rate=0.125, weight_decay=0.3), lamb, 0.3),
}
WEIGHTS = np.array([2.0, 3.0, 1.0], np.float32)  # examples of each replica


@pytest.mark.parametrize("clip", [0.0, 0.5], ids=["without_clip", "with_clip"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_mean_gradient_is_clipped_once_and_then_applied_on_every_copy(
    mirrored, problem, table, case, replicas, clip
):
    make, rule, decay = CASES[case]
    initial, sums = problem(replicas)
    # From update to update 1, 1/2, 1/4, ... as large: the first are clipped, the last are not, so that a clip which
    # always scales would show, also in Adam, which does not see a constant factor.
    sums = [{name: 4.0 * value * 0.5**i for name, value in of_update.items()} for i, of_update in enumerate(sums)]
    total = WEIGHTS[:replicas].sum()
    means = [{n: v.astype(np.float64).sum(axis=0, keepdims=True) / total for n, v in s.items()} for s in sums]
    norms = [np.sqrt(sum(np.square(v).sum() for v in mean.values())) for mean in means]
    if clip:
        assert norms[0] > clip > norms[-1]
        means = [{n: v * min(1.0, clip / norm) for n, v in mean.items()} for mean, norm in zip(means, norms)]
    rules = type("Rules", (), {"weight_decay": decay, "exclude": (), "rate_multipliers": {}})
    expected, _ = table(rule, initial, means, 0.125, rules)

    strategy = mirrored(replicas)
    with strategy.scope():
        variables = {name: tf.Variable(value, name=name) for name, value in initial.items()}
        optimizer = make()
        optimizer.build(list(variables.values()), list(variables))

    def replica_step(local):
        held = StepSums(
            gradients=[local[name] for name in variables],
            weight=local["weight"],
            stats={},
            variables=list(variables.values()),
        )
        return apply(reduce(held), optimizer, clip_global_norm=clip).grad_norm

    step = tf.function(lambda values: strategy.run(replica_step, (values,)))
    for of_update, norm in zip(sums, norms):
        values = strategy.experimental_distribute_values_from_function(
            lambda context, given=of_update: {
                "weight": tf.constant(WEIGHTS[context.replica_id_in_sync_group]),
                **{n: tf.constant(v[context.replica_id_in_sync_group]) for n, v in given.items()},
            }
        )
        for reported in strategy.experimental_local_results(step(values)):
            np.testing.assert_allclose(reported.numpy(), norm, rtol=1e-6)
    for name, variable in variables.items():
        copies = strategy.experimental_local_results(variable)
        assert len(copies) == replicas
        for copy in copies:
            np.testing.assert_allclose(copy.numpy(), expected[name], rtol=0, atol=2e-6, err_msg=name)
