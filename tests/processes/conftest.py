"""Fixtures of the tests that start processes."""

from cache_fixtures import entry, memory_path, read_only, templates, warnings  # noqa: F401 - fixtures
