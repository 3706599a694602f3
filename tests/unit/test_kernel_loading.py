"""What a worker's log says of its kernels: one line when all is there, progress with holder and key when it is not."""

import logging
from types import SimpleNamespace

import pytest
from stub_cache import settings_for, wanted

from jitspark.building.progress import Event
from jitspark.cache.lock import Holder
from jitspark.runtime import kernel_loading


@pytest.fixture
def load(tmp_path, monkeypatch, caplog):
    """Load a deployment of stub kernels, of which a build tells these events; `clock` goes on a second with each."""
    caplog.set_level(logging.INFO, "jitspark")
    items = wanted(4)
    times = iter(range(1000))
    monkeypatch.setattr(kernel_loading.time, "perf_counter", lambda: float(next(times)))
    monkeypatch.setattr(kernel_loading, "specializations", lambda _: ())
    monkeypatch.setattr(kernel_loading, "wanted_for", lambda *_: items)

    def run(*events, tell=lambda _: None):
        def build_and_load(asked, *_, on_event, **__):
            for kind, index, seconds, holder in events:
                on_event(Event(kind, asked[index].key, "stub(n=1)", index, len(asked), seconds, holder))
            return [SimpleNamespace() for _ in asked]

        monkeypatch.setattr(kernel_loading, "build_and_load", build_and_load)
        settings = settings_for(tmp_path / "cache", tmp_path)
        return kernel_loading.load_deployment(None, "sm_90a", settings, "jitspark warm", tell)

    run.items = items
    return run


def test_a_warm_start_is_one_line(load, caplog):
    found = load(*(("hit", index, 0.0, None) for index in range(4)))

    assert found.keys() == {item.key for item in load.items}
    assert [text.rpartition(",")[0] for text in caplog.messages] == ["kernels: 4 hits, 0 compiles"]


def test_a_cold_start_says_what_is_made_and_who_holds_it(load, caplog):
    holder = Holder(4711, "node7", "stub(n=1)", 0.0)
    load(
        ("hit", 0, 0.0, None),
        *(("compiling", 1, 2.0 * step, None) for step in range(6)),
        *(("waiting", 2, 7.0, holder) for _ in range(6)),
        ("compiled", 1, 12.0, None),
    )

    assert len(caplog.messages) == 3
    assert f"compiling stub(n=1) ({load.items[1].key}) for " in caplog.messages[0]
    assert caplog.messages[1].endswith(f"({load.items[2].key}) for 7 s, held by process 4711 on node7")
    assert caplog.messages[2].startswith("kernels: 3 hits, 1 compiles, ")


def test_whoever_listens_hears_every_event(load):
    heard = []
    load(("hit", 0, 0.0, None), ("compiling", 1, 2.0, None), tell=heard.append)

    assert [event.kind for event in heard] == ["hit", "compiling"]
