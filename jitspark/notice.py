"""Warnings about what is found again at every look: each is said once in the life of a process."""

import functools
import logging

logger = logging.getLogger("jitspark")


@functools.lru_cache(maxsize=1024)
def say_once(message: str) -> None:
    logger.warning("%s", message)
