"""Sizes, ages and shares as people write them."""

import re

from jitspark.errors import UsageError

_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)\Z")
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%\Z")


def parse_size(text: str, where: str) -> int:
    """Bytes: `2GB`, `500MiB`, `0`. Raises UsageError."""
    return int(_parse(text, _SIZES, where, "a size such as 2GB or 500MiB"))


def parse_age(text: str, where: str) -> float:
    """Seconds: `30d`, `12h`. Raises UsageError."""
    return _parse(text, _AGES, where, "an age such as 30d, 12h or 2w")


def parse_share(text: str, where: str) -> float:
    """A share from above 0 to 1: `10%`. Raises UsageError."""
    found = _SHARE.match(text)
    if found is None or not 0 < float(found[1]) <= 100:
        raise UsageError(where=where, found=repr(text[:80]), needed="a share such as 10%", remedy="Correct the value.")
    return float(found[1]) / 100


def _parse(text: str, units: dict[str, int], where: str, needed: str) -> float:
    found = _QUANTITY.match(text)
    # sizes in either case; an age's unit is lower case
    unit = next((each for each in (found[2], found[2].upper()) if each in units), None) if found else None
    if found is None or unit is None:
        raise UsageError(where=where, found=repr(text[:80]), needed=needed, remedy="Correct the value.")
    return float(found[1]) * units[unit]
