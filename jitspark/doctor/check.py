"""One check of `doctor`: what is looked at, how it turned out, and what a check raises instead of passing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jitspark.errors import JitsparkError
from jitspark.settings import Settings

Status = Literal["PASS", "FAIL", "NOTE"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, how it is, and for a FAIL what to do. A NOTE is nothing that stops jitspark here."""

    part: str
    status: Status
    text: str
    remedy: str = ""


class FailedError(Exception):
    """What was found instead, and what to do. `needed` is False for what this process can do without."""

    def __init__(self, found: str, remedy: str, *, needed: bool = True) -> None:
        super().__init__(found, remedy)
        self.found = found
        self.remedy = remedy
        self.needed = needed


def run(part: str, check: Callable[[Settings], str], settings: Settings) -> Check:
    """The check's text as a PASS, or what it raised as a FAIL or a NOTE."""
    try:
        return Check(part, "PASS", check(settings))
    except FailedError as failed:
        return Check(part, "FAIL" if failed.needed else "NOTE", failed.found, failed.remedy)
    except JitsparkError as error:
        return Check(part, "FAIL", f"{error.where}: found {error.found}", error.remedy)
    except OSError as problem:
        return Check(part, "FAIL", str(problem), "Mend what the system says.")
