"""Early stop on evaluation values."""

import math
import types

import pytest

from framework.errors import ConfigError
from framework.hooks import EarlyStop


def stopped_at(hook, evaluations, name=""):
    """The first step of ``evaluations`` (step -> values) after which ``hook`` has a reason."""
    for step, values in evaluations.items():
        hook.evaluated(step, name, values)
        if hook.reason:
            return step
    return None


def test_b13_stops_at_the_first_evaluation_where_the_condition_holds_and_says_why():
    hook = EarlyStop("loss", "<", 0.1)
    losses = {10: 0.5, 20: 0.11, 30: 0.1, 40: 0.08, 50: 0.01}
    assert stopped_at(hook, {step: {"loss": loss} for step, loss in losses.items()}) == 40
    assert hook.reason == "eval loss 0.08 < 0.1 at step 40"
    hook.evaluated(50, "", {"loss": 0.01})
    assert hook.reason == "eval loss 0.08 < 0.1 at step 40"


def test_b13_stops_above_a_limit():
    hook = EarlyStop("accuracy", ">", 0.9)
    assert stopped_at(hook, {1: {"accuracy": 0.9}, 2: {"accuracy": 0.95}}) == 2
    assert hook.reason == "eval accuracy 0.95 > 0.9 at step 2"


def test_b13_the_reason_never_rounds_a_value_to_its_limit():
    hook = EarlyStop("loss", "<", 0.1)
    hook.evaluated(5, "", {"loss": 0.0999999})
    assert hook.reason == "eval loss 0.0999999 < 0.1 at step 5"


def test_b13_training_values_never_stop():
    hook = EarlyStop("loss", "<", 0.1)
    hook(10, {"loss": 0.0})
    assert hook.reason is None


@pytest.mark.parametrize("sign", ["<", ">"])
def test_nan_never_stops(sign):
    hook = EarlyStop("loss", sign, 0.0)
    hook.evaluated(1, "", {"loss": math.nan})
    assert hook.reason is None


def test_b07_a_metric_left_out_later_or_an_evaluation_without_figures_never_stops():
    hook = EarlyStop("accuracy", "<", 1.0)
    hook.evaluated(1, "", {})
    hook.evaluated(2, "", {"loss": 1.0, "accuracy": 2.0})
    hook.evaluated(3, "", {"loss": 1.0})
    assert hook.reason is None


def test_a_metric_missing_at_the_first_evaluation_is_an_error_naming_those_there_are():
    hook = EarlyStop("acuracy", ">", 0.9)
    with pytest.raises(ConfigError, match=r"metric='acuracy' but .* use one of loss, accuracy$"):
        hook.evaluated(1, "", {"loss": 0.5, "accuracy": 0.99})


def test_a_metric_of_a_named_set_is_taken_from_that_set_alone():
    hook = EarlyStop("far/loss", "<", 0.1)
    hook.evaluated(10, "near", {"loss": 0.01})
    assert hook.reason is None
    hook.evaluated(10, "far", {"loss": 0.05})
    assert hook.reason == "eval/far loss 0.05 < 0.1 at step 10"


def test_the_bare_name_will_do_for_the_only_named_set():
    hook = EarlyStop("loss", "<", 0.1)
    assert stopped_at(hook, {10: {"loss": 0.5}, 20: {"loss": 0.05}}, name="far") == 20
    assert hook.reason == "eval/far loss 0.05 < 0.1 at step 20"


def test_the_bare_name_is_refused_where_several_sets_have_it():
    hook = EarlyStop("loss", "<", 0.1)
    hook.evaluated(10, "near", {"loss": 0.5})
    with pytest.raises(ConfigError, match="several evaluation sets have it; use one of near/loss, far/loss"):
        hook.evaluated(10, "far", {"loss": 0.5})


def test_the_bare_name_will_do_where_only_one_of_several_sets_has_it():
    hook = EarlyStop("recall", ">", 0.9)
    for step, recall in ((10, 0.5), (20, 0.95)):
        hook.evaluated(step, "near", {"loss": 0.5})
        hook.evaluated(step, "far", {"loss": 0.5, "recall": recall})
    assert hook.reason == "eval/far recall 0.95 > 0.9 at step 20"


def test_a_named_set_without_the_metric_is_an_error_at_its_first_evaluation():
    hook = EarlyStop("far/recall", ">", 0.9)
    hook.evaluated(10, "near", {"loss": 0.5})
    with pytest.raises(ConfigError, match="use one of near/loss, far/loss"):
        hook.evaluated(10, "far", {"loss": 0.5})


def test_a_set_that_does_not_exist_is_an_error_when_the_first_set_comes_again():
    hook = EarlyStop("fra/loss", "<", 0.1)
    hook.evaluated(10, "near", {"loss": 0.5})
    hook.evaluated(10, "far", {"loss": 0.5})
    with pytest.raises(ConfigError, match="metric='fra/loss' but no evaluation has it; use one of near/loss, far/loss"):
        hook.evaluated(20, "near", {"loss": 0.5})


def test_training_again_after_a_stop_forgets_the_reason():
    hook = EarlyStop("loss", "<", 0.1)
    hook.evaluated(10, "", {"loss": 0.0})
    assert hook.reason
    hook.begin(types.SimpleNamespace(step=10))
    assert hook.reason is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("", "<", 1.0), "metric"), (("loss", "=", 1.0), "sign"), (("loss", "<", math.nan), "limit")],
)
def test_b06_refused_arguments_are_named(arguments, named):
    with pytest.raises(ConfigError, match=f"^{named}="):
        EarlyStop(*arguments)
