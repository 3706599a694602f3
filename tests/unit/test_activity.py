"""What the log says of decode steps."""

import logging

from jitspark.runtime.activity import SECONDS, StepCounter


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_first_planned_step_and_then_a_line_a_minute(caplog):
    caplog.set_level(logging.INFO, "jitspark")
    clock = Clock()
    counter = StepCounter(clock)
    for planned in (False, True, True, True):
        counter.note(planned=planned)
    assert caplog.messages == ["decode: the first step ran a plan"]

    clock.now = SECONDS
    counter.note(planned=True)
    counter.note(planned=False)

    assert caplog.messages[1:] == ["decode: 4 steps ran plans, 1 others ran vLLM's own code"]


def test_an_idle_server_says_nothing(caplog):
    caplog.set_level(logging.INFO, "jitspark")
    StepCounter(Clock())

    assert caplog.messages == []
