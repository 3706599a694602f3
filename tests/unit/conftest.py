"""Fixtures of the unit tests."""

from cache_fixtures import entry, read_only, templates, warnings  # noqa: F401 - fixtures
from pack_fixtures import entries, layer, packed, plain  # noqa: F401 - fixtures
