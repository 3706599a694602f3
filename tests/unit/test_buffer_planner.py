"""Places in an arena against a naive checker: what lives at one time never overlaps, and nothing is wasted on order."""

from hypothesis import given
from hypothesis import strategies as st

from jitspark.plans.buffer_planner import ALIGNMENT, Tenant, intervals, meet, place
from jitspark.plans.plan import Launch, TensorArgument

LAUNCHES = 12


@st.composite
def spans(draw):
    """Ascending intervals that do not touch each other."""
    edges = sorted(draw(st.sets(st.integers(0, LAUNCHES), min_size=2, max_size=6)))
    return tuple(zip(edges[::2], edges[1::2], strict=False))


tenants = st.lists(st.tuples(st.integers(1, 5000), spans()), max_size=12).map(
    lambda rows: [Tenant(f"buffer{i}", size, found) for i, (size, found) in enumerate(rows)]
)


def alive(tenant, launch):
    return any(first <= launch <= last for first, last in tenant.intervals)


@given(tenants)
def test_what_lives_at_one_time_lies_apart(found):
    offsets, size = place(found)

    for launch in range(LAUNCHES + 1):
        taken = [byte for each in found if alive(each, launch) for byte in _bytes(each, offsets)]
        assert len(taken) == len(set(taken))
        assert all(byte < size for byte in taken)


def _bytes(tenant, offsets):
    return range(offsets[tenant.name], offsets[tenant.name] + tenant.size)


@given(tenants)
def test_places_are_aligned_and_the_same_in_any_order(found):
    assert all(offset % ALIGNMENT == 0 for offset in place(found)[0].values())
    assert place(found[::-1]) == place(found)


@given(tenants)
def test_an_arena_is_no_larger_than_all_buffers_side_by_side_and_no_smaller_than_what_lives_at_once(found):
    _, size = place(found)
    rounded = [(-(-each.size // ALIGNMENT) * ALIGNMENT, each) for each in found]

    assert size <= sum(length for length, _ in rounded)
    peak = max((sum(n for n, each in rounded if alive(each, launch)) for launch in range(LAUNCHES + 1)), default=0)
    assert size >= peak


@given(spans(), spans())
def test_intervals_meet_where_a_launch_is_in_both(one, other):
    first, second = Tenant("a", 1, one), Tenant("b", 1, other)
    together = any(alive(first, launch) and alive(second, launch) for launch in range(LAUNCHES + 1))

    assert meet(one, other) is together
    assert first.meets(second) is together


def launch(**roles):
    return Launch(
        "launch", "experts", "torch", "copy", None, tuple(TensorArgument(*each) for each in roles.items()), {}
    )


def test_memory_is_taken_over_after_the_last_read():
    steps = [launch(a="out"), launch(a="in", b="out"), launch(b="in", c="out"), launch(c="in")]
    found = intervals(steps)

    assert found == {"a": ((0, 1),), "b": ((1, 2),), "c": ((2, 3),)}
    offsets, size = place([Tenant(name, 100, spans) for name, spans in found.items()])
    assert offsets["c"] == offsets["a"] != offsets["b"]
    assert size == 2 * ALIGNMENT


def test_a_buffer_that_is_written_afresh_is_free_in_between():
    steps = [launch(a="out"), launch(a="in"), launch(b="out"), launch(b="in"), launch(a="part"), launch(a="in")]

    assert intervals(steps) == {"a": ((0, 1), (4, 5)), "b": ((2, 3),)}


def test_in_place_and_unread_writes_prolong_a_life():
    steps = [launch(a="out"), launch(a="inout"), launch(b="out"), launch(a="in"), launch(b="part"), launch(b="in")]

    assert intervals(steps) == {"a": ((0, 3),), "b": ((2, 5),)}


def test_what_is_read_before_it_is_written_lives_from_the_start():
    assert intervals([launch(a="out"), launch(b="in")])["b"] == ((0, 1),)
