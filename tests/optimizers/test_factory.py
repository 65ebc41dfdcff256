"""The optimizer that a configuration names, with the settings it names."""

from __future__ import annotations

import re

import pytest
import tensorflow as tf

from framework.config import DECAYING, OPTIMIZERS, RunConfig
from framework.errors import ConfigError
from framework.optimizers import LAMB, LARS, SGD, Adafactor, Adam, AdamW, Lion, Muon, from_config

KINDS = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "lamb": LAMB,
    "lars": LARS,
    "lion": Lion,
    "adafactor": Adafactor,
    "muon": Muon,
}


def test_every_name_is_an_optimizer_that_updates_and_has_the_configured_rate():
    assert set(KINDS) == set(OPTIMIZERS)
    for name, kind in KINDS.items():
        optimizer = from_config(RunConfig(optimizer=name, learning_rate=0.25), None)
        assert type(optimizer) is kind
        w = tf.Variable([[1.0, 2.0]])
        optimizer.build([w], ["w"])
        optimizer.update([tf.constant([[1.0, -1.0]])])
        assert float(optimizer.learning_rate()) == 0.25
        assert w.numpy()[0, 0] < 1.0 and w.numpy()[0, 1] > 2.0


@pytest.mark.parametrize(
    "name,expected",
    [
        ("sgd", {"momentum": 0.9}),
        ("adam", {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}),
        ("adamw", {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}),
        ("lamb", {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-6}),
        ("lars", {"momentum": 0.9, "trust_coefficient": 0.001}),
        ("lion", {"beta_1": 0.9, "beta_2": 0.99}),
        ("muon", {"momentum": 0.95, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}),
    ],
)
def test_without_options_each_has_its_own_usual_settings(name, expected):
    optimizer = from_config(RunConfig(optimizer=name), None)
    assert {key: getattr(optimizer, key) for key in expected} == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_given_options_reach_the_optimizer(name):
    options = {"momentum": 0.5, "beta_1": 0.25, "beta_2": 0.75, "epsilon": 0.125}
    optimizer = from_config(RunConfig(optimizer=name, **options), None)
    seen = {key: value for key, value in options.items() if hasattr(optimizer, key)}
    assert seen or name == "adafactor"
    assert {key: getattr(optimizer, key) for key in seen} == seen


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_multipliers_are_for_all_and_decay_is_for_those_that_decay(name):
    options = {"optimizer": name, "learning_rate_multipliers": "backbone=0.1, ^head$=2"}
    if name in DECAYING:
        options |= {"weight_decay": 0.5, "decay_exclude": "bias,gamma, beta"}
    optimizer = from_config(RunConfig(**options), None)
    assert optimizer.rate_multipliers == {"backbone": 0.1, "^head$": 2.0}
    assert list(optimizer.rate_multipliers) == ["backbone", "^head$"]
    if name in DECAYING:
        assert (optimizer.weight_decay, optimizer.exclude) == (0.5, ("bias", "gamma", "beta"))
    else:
        assert (optimizer.weight_decay, optimizer.exclude) == (0.0, ())


def test_the_matrices_that_are_not_muons_can_be_named():
    assert from_config(RunConfig(optimizer="muon", muon_exclude="output,embed"), None).adamw == ("output", "embed")
    assert from_config(RunConfig(optimizer="muon"), None).adamw == Muon(learning_rate=0.1).adamw


@pytest.mark.parametrize(
    "options,message",
    [
        ({"optimizer": "sgd", "weight_decay": 0.1}, "weight_decay=0.1 with optimizer=sgd"),
        ({"optimizer": "adam", "weight_decay": 0.1}, "weight_decay=0.1 with optimizer=adam"),
        ({"optimizer": "adam", "decay_exclude": "bias"}, "decay_exclude=bias with optimizer=adam"),
        ({"optimizer": "adamw", "muon_exclude": "head"}, "muon_exclude=head with optimizer=adamw"),
        ({"decay_exclude": "bias,("}, "decay_exclude='bias,(' but '(' is no regular expression"),
        ({"decay_exclude": "bias,,beta"}, "decay_exclude='bias,,beta' but '' is no regular expression"),
        ({"learning_rate_multipliers": "head"}, "'head' is not PATTERN=NUMBER"),
        ({"learning_rate_multipliers": "head=fast"}, "'head=fast' is not PATTERN=NUMBER"),
        ({"learning_rate_multipliers": "head=-1"}, "'head=-1' is not PATTERN=NUMBER"),
        ({"learning_rate_multipliers": "head=nan"}, "'head=nan' is not PATTERN=NUMBER"),
        ({"learning_rate_multipliers": "=1"}, "'=1' is not PATTERN=NUMBER"),
        ({"learning_rate_multipliers": "(=1"}, "'(' is no regular expression"),
        ({"beta_2": 1.0}, "beta_2=1.0 but it must be below 1"),
    ],
)
def test_options_that_do_not_go_together_or_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunConfig(**options)
