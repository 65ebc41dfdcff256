"""The framework's optimizers against Keras's of the same name: two readings of one paper."""

from __future__ import annotations

import keras.optimizers as K
import numpy as np
import pytest

from framework.optimizers import LAMB, Adafactor, KerasOptimizer, Lion, Muon

# What differs by intent: Keras takes the powers of its betas in float32, which is off by up to 1e-4 of a step of 0.1
# in the first updates.
CASES = {
    "lamb": (lambda: LAMB(learning_rate=0.1), lambda: K.Lamb(0.1, epsilon=1e-6), 2e-5),
    "lion": (lambda: Lion(learning_rate=0.1, weight_decay=0.3), lambda: K.Lion(0.1, weight_decay=0.3), 1e-6),
    # Keras bounds the rate by 1 / sqrt(t); 0.1 is below that for the first 100 updates.
    "adafactor": (lambda: Adafactor(learning_rate=0.1), lambda: K.Adafactor(0.1, relative_step=False), 3e-6),
    "muon": (
        lambda: Muon(learning_rate=0.1, weight_decay=0.3),
        lambda: K.Muon(0.1, weight_decay=0.3, adam_weight_decay=0.3),
        2e-5,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_five_updates_equal_those_of_keras(train, problem, case):
    ours, peer, atol = CASES[case]
    initial, gradients = problem(1, more=True)
    mine = train(ours, initial, gradients, 1)
    theirs = train(lambda: KerasOptimizer(peer()), initial, gradients, 1)
    for name in initial:
        np.testing.assert_allclose(mine.variables[0][name], theirs.variables[0][name], rtol=0, atol=atol, err_msg=name)
