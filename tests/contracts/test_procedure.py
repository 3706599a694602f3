"""Our own way from a spec to bytes is in every key as one number, which somebody has to raise."""

import hashlib
from pathlib import Path

from jitspark.key import PROCEDURE

SOURCES = Path(__file__).resolve().parents[2] / "jitspark" / "compiler"

# procedure -> digest of the lines of cute.py and link.py, comments aside
KNOWN = {1: "732a9dfdc26cace9c09bdb6c70025837872623acb2ee6ae523a223653190602d"}


def code_digest(paths):
    lines = (line.strip() for path in paths for line in path.read_text().splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line and not line.startswith("#")).encode()).hexdigest()


def test_the_procedure_is_raised_when_its_code_changes():
    found = code_digest([SOURCES / "cute.py", SOURCES / "link.py"])

    assert KNOWN.get(PROCEDURE) == found, (
        "jitspark/compiler/cute.py or link.py changed. If an artifact can come out different, raise PROCEDURE in "
        f"jitspark/key.py; either way write {{{PROCEDURE} or its successor: {found!r}}} into KNOWN."
    )
