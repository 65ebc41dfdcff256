"""What a contender reports: windows closed by the device, start-up apart, waiting not counted."""

import pytest

from benchmarks.contender import Reporter


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


class Loss:
    """A value on a device: reading it waits for what the device still computes."""

    def __init__(self, value, clock, seconds):
        self._value, self._clock, self._seconds = value, clock, seconds

    def __float__(self):
        self._clock.now += self._seconds
        return self._value


class Parent:
    """Takes messages, and lets ``wait`` seconds pass before it gives leave for the next window."""

    def __init__(self, clock, wait=0.0):
        self.messages, self.gone = [], False
        self._clock, self._wait = clock, wait

    def send(self, message):
        self.messages.append(message)

    def receive(self):
        self._clock.now += self._wait
        return "" if self.gone else "go\n"


def reporter(clock, parent, cpu_clock=None, started=0.0):
    return Reporter(
        send=parent.send,
        receive=parent.receive,
        memory=lambda: 123.0,
        started=started,
        clock=clock,
        cpu_clock=cpu_clock or Clock(),
    )


def test_b45_a_window_ends_when_the_device_has_finished_not_when_the_call_returned():
    clock = Clock()
    parent = Parent(clock)
    report = reporter(clock, parent)
    report(1, 2.0)
    clock.now += 3.0  # the call that starts the steps
    report(11, Loss(1.5, clock, seconds=2.0))  # reading the loss waits for them
    assert parent.messages[1]["seconds"] == 5.0
    assert parent.messages[1]["steps"] == 10
    assert parent.messages[1]["loss"] == 1.5


def test_b45_what_other_contenders_take_in_between_is_not_in_the_window():
    clock = Clock()
    parent = Parent(clock, wait=100.0)
    report = reporter(clock, parent)
    report(1, 2.0)
    clock.now += 3.0
    report(11, 1.5)
    clock.now += 4.0
    report(31, 1.0)
    assert [m["seconds"] for m in parent.messages[1:]] == [3.0, 4.0]
    assert [m["steps"] for m in parent.messages[1:]] == [10, 20]


def test_b47_the_first_step_is_counted_from_the_start_of_the_process_and_is_in_no_window():
    clock = Clock(1007.0)  # the imports took 7 s
    parent = Parent(clock)
    report = reporter(clock, parent, started=1000.0)
    report.facts(parameters=85002, settings={"optimizer": "adamw"})
    clock.now += 20.0  # building, tracing, compiling, the first step
    report(1, 2.0)
    clock.now += 1.0
    report(11, 1.5)
    first, window = parent.messages
    assert (first["import_s"], first["first_step_s"]) == (7.0, 27.0)
    assert first["facts"] == {"parameters": 85002, "settings": {"optimizer": "adamw"}}
    assert "seconds" not in first
    assert window["seconds"] == 1.0


def test_processor_time_is_that_of_the_window():
    clock, cpu_clock = Clock(), Clock(50.0)
    parent = Parent(clock)
    report = reporter(clock, parent, cpu_clock)
    report(1, 2.0)
    cpu_clock.now += 1.5
    report(11, 1.5)
    assert parent.messages[1]["cpu_seconds"] == 1.5
    assert parent.messages[1]["rss_mb"] == 123.0


def test_a_contender_ends_with_its_parent():
    clock = Clock()
    parent = Parent(clock)
    parent.gone = True
    with pytest.raises(SystemExit):
        reporter(clock, parent)(1, 2.0)
