"""Says in the log how many decode steps ran plans, so that somebody who looks can see that they do."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger("jitspark")

SECONDS = 60.0  # between two lines, and only while there are steps


class StepCounter:
    """Counts the steps of a server. `planned`: by a graph that was captured through a plan."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told = clock()
        self._planned = self._other = 0
        self._first = True

    def note(self, *, planned: bool) -> None:
        """One step more."""
        if planned:
            self._planned += 1
        else:
            self._other += 1
        if planned and self._first:
            self._first = False
            logger.info("decode: the first step ran a plan")
        if self._clock() - self._told >= SECONDS:
            self._tell()

    def _tell(self) -> None:
        logger.info("decode: %d steps ran plans, %d others ran vLLM's own code", self._planned, self._other)
        self._told, self._planned, self._other = self._clock(), 0, 0
