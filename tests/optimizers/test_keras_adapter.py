"""Keras optimizers behind an explicit all-reduce, against the same optimizer on one device with summed gradients."""

from __future__ import annotations

import gc
import re
import warnings

import keras
import keras.optimizers as K
import numpy as np
import pytest
import tensorflow as tf

from framework.errors import ConfigError
from framework.optimizers import SGD, KerasOptimizer, as_optimizer


class TwoRates(K.Optimizer):
    """A user's optimizer: a slot of its own making, a scalar, and an own rule."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.memory = self.add_optimizer_variables(variables, "memory")
        self._largest = [keras.Variable(0.0) for _ in variables]
        self.total = self.add_variable(shape=(), name="anything")

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        largest = keras.ops.maximum(self._largest[index], keras.ops.max(keras.ops.abs(gradient)))
        self._largest[index].assign(largest)
        self.assign(self.memory[index], 0.5 * self.memory[index] + gradient)
        self.total.assign_add(keras.ops.sum(gradient))
        variable.assign_sub(learning_rate * self.memory[index] / largest)


class Thirds(K.schedules.LearningRateSchedule):
    """A user's schedule, not registered with Keras and without get_config."""

    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32") / 3.0)


def excluding(optimizer, names):
    optimizer.exclude_from_weight_decay(var_names=names)
    return optimizer


MAKERS = {
    "SGD": lambda: K.SGD(0.1),
    "SGD_momentum": lambda: K.SGD(0.1, momentum=0.9),
    "SGD_nesterov": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "SGD_decay_clipnorm": lambda: K.SGD(0.1, weight_decay=0.2, clipnorm=0.5),
    "SGD_clipvalue": lambda: K.SGD(0.1, clipvalue=0.3),
    "SGD_global_clipnorm": lambda: K.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
    "SGD_ema": lambda: K.SGD(0.1, use_ema=True, ema_momentum=0.8),
    "Adam": lambda: K.Adam(0.1),
    "Adam_amsgrad": lambda: K.Adam(0.1, amsgrad=True),
    "AdamW": lambda: K.AdamW(0.1, weight_decay=0.3),
    "AdamW_exclude": lambda: excluding(K.AdamW(0.1, weight_decay=0.3), ["bias"]),
    "Nadam": lambda: K.Nadam(0.1),
    "RMSprop": lambda: K.RMSprop(0.1, momentum=0.9, centered=True),
    "Adagrad": lambda: K.Adagrad(0.1),
    "Lion": lambda: K.Lion(0.1),
    "Lamb": lambda: K.Lamb(0.1),
    "Adafactor": lambda: K.Adafactor(0.1),
    "Ftrl": lambda: K.Ftrl(0.1, l1_regularization_strength=0.01),
    "Adamax": lambda: K.Adamax(0.1),
    "Adadelta": lambda: K.Adadelta(0.1),
    "Muon": lambda: K.Muon(0.1),
    "ScheduleFreeAdamW": lambda: K.ScheduleFreeAdamW(0.1, warmup_steps=3),
    "cosine": lambda: K.Adam(K.schedules.CosineDecay(0.1, 6)),
    "users_optimizer": lambda: TwoRates(learning_rate=0.1),
    "users_optimizer_and_schedule": lambda: TwoRates(learning_rate=Thirds(), weight_decay=0.1),
}


def alone(make, initial, gradients):
    """Plain Keras on one device, given the sums: (optimizer, arrays of variables by name)."""
    optimizer = make()
    variables = {name: keras.Variable(value, name=name.replace("/", "_")) for name, value in initial.items()}
    optimizer.build(list(variables.values()))
    for of_update in gradients:
        sums = {name: parts.sum(axis=0) for name, parts in of_update.items() if parts is not None}
        optimizer.apply([tf.constant(g) for g in sums.values()], [variables[name] for name in sums])
    return optimizer, {name: variable.numpy() for name, variable in variables.items()}


@pytest.mark.parametrize("case", MAKERS)
def test_two_replicas_equal_plain_keras_given_the_sums(train, problem, mirrored, case):
    make = MAKERS[case]
    initial, gradients = problem(2)
    plain, expected = alone(make, initial, gradients)
    result = train(lambda: KerasOptimizer(make()), initial, gradients, 2, cond=True)
    adapted = result.optimizer.optimizer
    for variables, state in zip(result.variables, result.state):
        assert state["iterations"] == 5
        for name in initial:
            np.testing.assert_allclose(variables[name], expected[name], rtol=0, atol=1e-6)
            assert np.any(variables[name] != initial[name])
    # Slots, in the order in which Keras lists them, on every copy.
    assert len(adapted.variables) == len(plain.variables) == len(result.state[0])
    for ours, theirs in zip(adapted.variables, plain.variables):
        for copy in mirrored(2).experimental_local_results(ours.value):
            np.testing.assert_allclose(copy.numpy(), theirs.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("case", ["AdamW", "Nadam", "users_optimizer_and_schedule"])
def test_one_and_three_replicas_equal_plain_keras_given_the_sums(train, problem, case, replicas):
    initial, gradients = problem(replicas)
    _, expected = alone(MAKERS[case], initial, gradients)
    result = train(lambda: KerasOptimizer(MAKERS[case]()), initial, gradients, replicas)
    for variables in result.variables:
        for name in initial:
            np.testing.assert_allclose(variables[name], expected[name], rtol=0, atol=1e-6)


def test_a_users_own_loop_over_variables_does_not_reduce_either(train):
    class OwnLoop(K.SGD):
        def _backend_update_step(self, grads, trainable_variables, learning_rate):
            for gradient, variable in self._all_reduce_sum_gradients(list(zip(grads, trainable_variables))):
                self.update_step(gradient, variable, learning_rate)

    gradients = [{"w": np.array([1.0, 2.0], np.float32)}]
    result = train(lambda: KerasOptimizer(OwnLoop(1.0)), {"w": np.float32(0.0)}, gradients, 2)
    assert [variables["w"] for variables in result.variables] == [-3.0, -3.0]


@pytest.mark.parametrize("cond", [False, True], ids=["plain", "in_cond"])
def test_clipping_in_the_keras_optimizer_acts_on_the_sum(train, cond):
    # [10, 0] + [0, 10], clipped to norm 1; clipped before the sum, the norm would be 1.414.
    gradients = [{"w": np.array([[10.0, 0.0], [0.0, 10.0]], np.float32)}]
    make = lambda: KerasOptimizer(K.SGD(1.0, global_clipnorm=1.0))  # noqa: E731
    result = train(make, {"w": np.zeros([2], np.float32)}, gradients, 2, cond)
    for variables in result.variables:
        np.testing.assert_allclose(variables["w"], [-(0.5**0.5)] * 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["SGD_momentum", "AdamW", "Nadam"])
def test_a_variable_without_gradient_and_its_slots_stay_bit_identical(train, problem, case):
    make = lambda: KerasOptimizer(MAKERS[case]())  # noqa: E731
    initial, gradients = problem(2)
    before = train(make, initial, gradients[:2], 2, cond=True)
    without_bias = [gradients[0], gradients[1], *({**g, "dense/bias": None} for g in gradients[2:])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing gradient is the step's to report, once, by name
        after = train(make, initial, without_bias, 2, cond=True)
    for i in range(2):
        np.testing.assert_array_equal(after.variables[i]["dense/bias"], before.variables[i]["dense/bias"])
        slots = [name for name in after.state[i] if name.endswith("/dense/bias")]
        assert slots
        for name in slots:
            np.testing.assert_array_equal(after.state[i][name], before.state[i][name])
        assert after.state[i]["iterations"] == 5


def test_an_update_without_any_gradient_still_counts():
    w = tf.Variable(1.0)
    optimizer = KerasOptimizer(K.SGD(1.0))
    optimizer.build([w], ["w"])
    optimizer.update([None])
    assert (w.numpy(), optimizer.iterations.numpy(), optimizer.optimizer.iterations.numpy()) == (1.0, 1, 1)


@pytest.mark.parametrize(
    "case,names",
    [
        ("SGD_momentum", ["iterations", "learning_rate", "momentum/{0}", "momentum/{1}", "momentum/{2}"]),
        ("SGD_ema", ["iterations", "learning_rate", "average/{0}", "average/{1}", "average/{2}"]),
        ("cosine", ["iterations", *(f"{slot}/{{{i}}}" for i in range(3) for slot in ("momentum", "velocity"))]),
        (
            "Nadam",
            [
                "iterations",
                "learning_rate",
                *(f"{slot}/{{{i}}}" for i in range(3) for slot in ("momentum", "velocity")),
                "u_product",
            ],
        ),
        (
            "Adafactor",
            ["iterations", "learning_rate", *(f"{slot}/{{{i}}}" for i in range(3) for slot in ("r", "c", "velocity"))],
        ),
        (
            "users_optimizer",
            [
                "iterations",
                "learning_rate",
                *(f"memory/{{{i}}}" for i in range(3)),
                *(f"largest/{{{i}}}" for i in range(3)),
                "total",
            ],
        ),
    ],
)
def test_state_is_named_by_slot_and_variable_and_not_by_keras_counters(case, names):
    # "a" and "a_momentum/w" join with underscores to names that a search by prefix or suffix would confuse.
    of_variables = ["a", "a/momentum", "a_momentum/w"]
    expected = [name.format(*of_variables) for name in names]
    for _ in range(2):  # the second time, Keras's counters of automatic names stand elsewhere
        optimizer = KerasOptimizer(MAKERS[case]())
        variables = [tf.Variable(np.full([2, i + 2], float(i), np.float32), name="v") for i in range(3)]
        optimizer.build(variables, of_variables)
        state = optimizer.state()
        assert sorted(state) == sorted(expected)
        assert all(isinstance(variable, tf.Variable) for variable in state.values())
        for i, name in enumerate(of_variables):
            slots = [v for key, v in state.items() if key.partition("/")[2] == name and v.shape.rank == 2]
            assert all(slot.shape == variables[i].shape for slot in slots)


def test_two_slots_of_one_kind_for_one_variable_get_different_names():
    class Twice(K.Optimizer):
        def build(self, variables):
            super().build(variables)
            self.pairs = [[self.add_variable_from_reference(v) for _ in range(2)] for v in variables]

    optimizer = KerasOptimizer(Twice(learning_rate=0.1))
    optimizer.build([tf.Variable(1.0), tf.Variable(2.0)], ["a", "b"])
    assert list(optimizer.state()) == ["iterations", "learning_rate", "var/a", "var/a_2", "var/b", "var/b_2"]


def test_keras_variables_are_taken_as_they_are_with_constraint_and_path(mirrored):
    strategy = mirrored(2)
    seen: list[str] = []

    class Looks(K.SGD):
        def build(self, variables):
            seen.extend(variable.path for variable in variables)
            super().build(variables)

    with strategy.scope():
        layer = keras.layers.Dense(
            1, use_bias=False, kernel_constraint="non_neg", kernel_initializer="ones", name="looked_at"
        )
        layer.build((None, 2))
        optimizer = KerasOptimizer(Looks(1.0, momentum=0.5))
        optimizer.build(layer.trainable_variables, ["given"])
    step = tf.function(lambda: strategy.run(lambda: optimizer.update([tf.constant([[0.25], [3.0]])])))
    step()
    for copy in strategy.experimental_local_results(layer.kernel.value):
        np.testing.assert_array_equal(copy.numpy(), [[0.75], [0.0]])
    assert seen == ["looked_at/kernel"]
    assert set(optimizer.state()) == {"iterations", "learning_rate", "momentum/given"}


def test_the_rate_of_the_next_update_follows_a_users_schedule_on_every_replica(mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        w = tf.Variable(0.0)
        optimizer = KerasOptimizer(K.SGD(Thirds()))
        optimizer.build([w], ["w"])

    @tf.function
    def step():
        def replica_step():
            rate = optimizer.learning_rate()
            optimizer.update([tf.constant(1.0)])
            return rate

        return strategy.experimental_local_results(strategy.run(replica_step))

    rates = np.array([[float(value) for value in step()] for _ in range(4)])
    np.testing.assert_allclose(rates, np.array([[0.1, 0.1], [0.075, 0.075], [0.06, 0.06], [0.05, 0.05]]), rtol=1e-6)
    np.testing.assert_allclose(
        [copy.numpy() for copy in strategy.experimental_local_results(w)], [-0.285] * 2, rtol=1e-6
    )
    assert optimizer.learning_rate().dtype == tf.float32


def test_a_rate_set_by_the_user_is_used_by_every_replica_and_saved(mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        w = tf.Variable(0.0)
        optimizer = KerasOptimizer(K.SGD(1.0))
        optimizer.build([w], ["w"])
        optimizer.optimizer.learning_rate = 0.25
    step = tf.function(lambda: strategy.run(lambda: optimizer.update([tf.constant(1.0)])))
    step()
    assert [copy.numpy() for copy in strategy.experimental_local_results(w)] == [-0.25, -0.25]
    assert optimizer.state()["learning_rate"].numpy() == 0.25


def test_an_optimizer_constructed_outside_the_scope_has_its_slots_in_it(mirrored):
    strategy = mirrored(2)
    users = K.Adam(0.1)
    with strategy.scope():
        optimizer = KerasOptimizer(users)
        optimizer.build([tf.Variable([1.0, 2.0])], ["w"])
    for name, variable in optimizer.state().items():
        assert len(strategy.experimental_local_results(variable)) == 2, name
        assert variable.aggregation == tf.VariableAggregation.NONE, name
    assert users is optimizer.optimizer
    assert users.iterations.value is optimizer.iterations
    assert [variable.aggregation for variable in users.variables] == ["none"] * 4


def test_a_resume_from_state_is_exact(train, problem):
    initial, gradients = problem(1)
    make = lambda: KerasOptimizer(K.Nadam(K.schedules.CosineDecay(0.1, 6)))  # noqa: E731
    unbroken = train(make, initial, gradients, 1)
    first = train(make, initial, gradients[:3], 1)
    resumed = make()
    variables = [tf.Variable(first.variables[0][name]) for name in initial]
    resumed.build(variables, list(initial))
    for name, variable in resumed.state().items():
        variable.assign(first.state[0][name])
    step = tf.function(resumed.update)
    for of_update in gradients[3:]:
        step([tf.constant(of_update[name][0]) for name in initial])
    for name, variable in zip(initial, variables):
        np.testing.assert_array_equal(variable.numpy(), unbroken.variables[0][name])


def test_keras_still_saves_the_object_as_the_class_the_user_knows():
    users = K.AdamW(0.25, weight_decay=0.1)
    KerasOptimizer(users).build([tf.Variable(1.0)], ["w"])
    assert isinstance(users, K.AdamW)
    assert K.serialize(users)["module"] == K.AdamW.__module__
    again = K.deserialize(K.serialize(users))
    assert type(again) is K.AdamW
    assert (float(again.learning_rate), again.weight_decay) == (0.25, 0.1)


def test_the_class_of_other_optimizers_is_left_alone():
    KerasOptimizer(K.SGD(0.1)).build([tf.Variable(1.0)], ["w"])
    assert type(K.SGD(0.1)) is K.SGD
    gc.collect()
    assert [c.__name__ for c in K.SGD.__mro__[:3]] == ["SGD", "Optimizer", "TFOptimizer"]


def test_update_outside_the_replica_context_of_its_strategy_is_refused(mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        optimizer = KerasOptimizer(K.SGD(0.1))
        optimizer.build([tf.Variable(1.0)], ["w"])
    with pytest.raises(RuntimeError, match="outside the replica context of MirroredStrategy"):
        optimizer.update([tf.constant(1.0)])


class Lookahead(K.Optimizer):
    """Holds another optimizer, whose apply would reduce by itself."""

    def __init__(self, inner):
        super().__init__(learning_rate=0.1)
        self.inner = inner


def built():
    optimizer = K.SGD(0.1)
    optimizer.build([keras.Variable(1.0)])
    return optimizer


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: K.SGD(0.1, gradient_accumulation_steps=2), "gradient_accumulation_steps=2 .* --global_batch_size"),
        (lambda: K.LossScaleOptimizer(K.SGD(0.1)), "LossScaleOptimizer.* pass its inner_optimizer"),
        (lambda: K.SGD(0.1, loss_scale_factor=8.0), r"loss_scale_factor=8\.0 .* leave it out"),
        (lambda: K.SGD(0.1, use_ema=True, ema_overwrite_frequency=5), "ema_overwrite_frequency=5 .* keep use_ema"),
        (lambda: K.MultiOptimizer(lambda variable: K.SGD(0.1)), "MultiOptimizer holds other .* pass one optimizer"),
        (lambda: Lookahead(K.SGD(0.1)), "Lookahead holds other .* pass one optimizer"),
        (lambda: Lookahead([K.SGD(0.1)]), "Lookahead holds other"),
        (built, "SGD is already built.* pass a new one"),
        (lambda: "adam", "optimizer='adam' is a str, .* for example"),
        (lambda: K.SGD, "is a type, .* for example"),
        (lambda: None, "optimizer=None is a NoneType"),
    ],
)
def test_what_cannot_work_is_refused_with_a_cure(make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        as_optimizer(make())
    assert "\n" not in str(caught.value)


def test_an_optimizer_built_between_construction_and_build_is_refused():
    users = K.SGD(0.1)
    optimizer = KerasOptimizer(users)
    w = tf.Variable(1.0)
    users.build([w])
    with pytest.raises(ConfigError, match=re.escape("already built")):
        optimizer.build([w], ["w"])


def test_as_optimizer_keeps_the_frameworks_and_wraps_keras():
    ours, theirs = SGD(learning_rate=0.1), K.SGD(0.1)
    assert as_optimizer(ours) is ours
    wrapped = as_optimizer(theirs)
    assert isinstance(wrapped, KerasOptimizer)
    assert wrapped.optimizer is theirs
    assert as_optimizer(wrapped) is wrapped


def test_a_second_build_for_some_of_the_variables_updates_those_and_keeps_all_slots():
    variables = {name: keras.Variable(1.0, name=name) for name in "ab"}
    optimizer = KerasOptimizer(K.SGD(1.0, momentum=0.5))
    optimizer.build(list(variables.values()), list(variables))
    optimizer.update([tf.constant(1.0), tf.constant(1.0)])
    optimizer.build([variables["b"]], ["b"])
    optimizer.update([tf.constant(1.0)])
    assert [float(v.value) for v in variables.values()] == [0.0, -1.5]
    optimizer.build([variables["b"].value, variables["a"].value], ["b", "a"])
    optimizer.update([tf.constant(0.0), tf.constant(0.0)])
    assert [float(v.value) for v in variables.values()] == [-0.5, -2.25]
    assert {"momentum/a", "momentum/b"} <= set(optimizer.state())


def test_a_second_build_with_new_variables_is_refused_with_the_cure():
    a, b = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = KerasOptimizer(K.SGD(1.0))
    optimizer.build([a], ["a"])
    for variables, names in (([a, b], ["a", "b"]), ([b], ["a"])):
        with pytest.raises(ConfigError, match="build it on all variables first and freeze layers afterwards"):
            optimizer.build(variables, names)
    optimizer.update([tf.constant(1.0)])
    assert (a.numpy(), b.numpy()) == (0.0, 1.0)
