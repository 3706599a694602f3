"""Our own way from a spec to bytes is in every key as one number, which somebody has to raise."""

import hashlib
from pathlib import Path

from jitspark.key import PROCEDURE

SOURCES = Path(__file__).resolve().parents[2] / "jitspark" / "compiler"

# procedure -> digest of the lines of cute.py and link.py, comments aside
KNOWN = {1: "fc565703ec359425d1539ba33186d8e6b2ae9495cd0d03c83bb70e201a99765c"}


def code_digest(paths):
    lines = (line.strip() for path in paths for line in path.read_text().splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line and not line.startswith("#")).encode()).hexdigest()


def test_the_procedure_is_raised_when_its_code_changes():
    found = code_digest([SOURCES / "cute.py", SOURCES / "link.py"])

    assert KNOWN.get(PROCEDURE) == found, (
        "jitspark/compiler/cute.py or link.py changed. If an artifact can come out different, raise PROCEDURE in "
        f"jitspark/key.py; either way write {{{PROCEDURE} or its successor: {found!r}}} into KNOWN."
    )
