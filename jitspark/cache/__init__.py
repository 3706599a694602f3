"""Entries on disk and their way into a process: found, verified and loaded, with neither a lock nor a compiler."""
