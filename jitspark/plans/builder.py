"""Makes a plan launch by launch from specs: arguments in the spec's order, buffers in the shapes that it declares.

What a launch writes and nobody has named before becomes a workspace buffer. Shapes that disagree are our own mistake.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jitspark.key import Key, canonical, recipe_of
from jitspark.plans.buffer_planner import Tenant, intervals, place
from jitspark.plans.checks import PlanChecker
from jitspark.plans.plan import CUTE, Argument, Buffer, Kind, Launch, Plan, ScalarArgument, Size, Stage, TensorArgument
from jitspark.plans.plan import WeightSource as Source
from jitspark.spec import DTYPE_BYTES, Scalar, Specialization, Tensor
from jitspark.target import host_name

TORCH = "torch"  # glue that is no kernel of ours: copies


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight in an argument's place."""

    name: str
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """A buffer that is neither made by a launch nor a weight, in an argument's place: an exchange's."""

    name: str
    kind: Kind
    of: str | None = None


Given = str | Weight | Memory | float | int


class Keys:
    """Keys of specializations for one target, each computed once: hashing a kernel's sources takes a while."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._known: dict[bytes, Key] = {}

    def of(self, specialization: Specialization) -> Key:
        chosen = (specialization.name, specialization.axes, specialization.dtypes, specialization.statics)
        name = canonical(chosen)
        if name not in self._known:
            self._known[name] = recipe_of(specialization, self.target).key
        return self._known[name]


@dataclass(frozen=True, slots=True)
class Header:
    """What a plan is for."""

    stage: Stage
    geometry: str
    tp: int
    query_length: int
    rows: int
    target: str
    providers: Mapping[str, str] = field(default_factory=dict)


class PlanBuilder:
    """Collects buffers and launches. `providers` of the header names who serves a part, if not our kernels."""

    def __init__(self, header: Header, keys: Keys | None = None) -> None:
        self.header = header
        self._keys = keys or Keys(header.target)
        self._buffers: dict[str, Buffer] = {}
        self._launches: list[Launch] = []

    def provider(self, part: str) -> str:
        return self.header.providers.get(part, CUTE)

    def buffer(
        self,
        name: str,
        kind: Kind,
        shape: Sequence[Size],
        dtype: str,
        *,
        strides: Sequence[Size] | None = None,
        of: str | None = None,
        source: Source | None = None,
    ) -> str:
        """Declare a buffer, or see that it is declared in this way already. Returns its name."""
        made = Buffer(name, kind, tuple(shape), dtype, None if strides is None else tuple(strides), 0, of, source)
        assert self._buffers.setdefault(name, made) == made, f"{name} is {self._buffers[name]} and {made}"
        return name

    def launch(
        self, name: str, part: str, specialization: Specialization, given: Mapping[str, Given], **sizes: Size
    ) -> None:
        """A launch of a kernel of ours, or of whoever serves `part` in its place.

        `given` has a buffer or a number for each argument; `sizes` are VAR axes that no declared buffer shows.
        """
        provider, spec = self.provider(part), specialization.spec
        assert given.keys() == {arg.name for arg in specialization.args}, (name, given.keys())
        bound = self._bind(specialization, given, {**sizes, **specialization.axes})
        specialization.check({axis: size for axis, size in bound.items() if isinstance(size, int)})
        arguments = tuple(self._argument(specialization, arg, given[arg.name], bound) for arg in specialization.args)
        made = Launch(name, part, provider, spec.name, None, arguments, specialization.statics)
        if provider == CUTE:
            made = replace(made, key=self._keys.of(specialization), triggers_early=spec.triggers_early)
        else:  # whoever it is, it waits first
            made = replace(made, arguments=tuple(_waiting(argument) for argument in arguments))
        self._launches.append(made)

    def glue(self, name: str, part: str, operation: str, **arguments: tuple[str, str]) -> None:
        """A launch that is no kernel of ours: buffers and their roles, in order."""
        made = tuple(TensorArgument(buffer, role) for buffer, role in arguments.values())
        self._launches.append(Launch(name, part, TORCH, operation, None, made, {}))

    def plan(self) -> Plan:
        """The plan, its buffers placed, and checked. Raises PlanError when it does not make sense."""
        alive = intervals(self._launches)
        offsets, workspace = place(self._tenants(Kind.WORKSPACE, alive))
        everywhere = {name: ((0, len(self._launches)),) for name in self._buffers}
        # other ranks may read it at any time
        shared, symmetric = place([*self._tenants(Kind.SYMMETRIC, everywhere), *self._tenants(Kind.SIGNAL, everywhere)])
        placed = {**offsets, **shared}
        head = self.header
        made = Plan(
            stage=head.stage,
            geometry=head.geometry,
            tp=head.tp,
            query_length=head.query_length,
            rows=head.rows,
            target=head.target,
            host=host_name(),
            providers=head.providers,
            buffers=tuple(replace(each, offset=placed.get(name, 0)) for name, each in self._buffers.items()),
            launches=tuple(self._launches),
            workspace_bytes=workspace,
            symmetric_bytes=symmetric,
        )
        PlanChecker().require(made, f"{head.stage} plan of {head.geometry}, {head.rows} rows")
        return made

    def _tenants(self, kind: Kind, alive: Mapping[str, tuple[tuple[int, int], ...]]) -> list[Tenant]:
        return [Tenant(name, nbytes(each), alive[name]) for name, each in self._buffers.items() if each.kind is kind]

    def _bind(
        self, specialization: Specialization, given: Mapping[str, Given], sizes: Mapping[str, Size]
    ) -> dict[str, Size]:
        """A size for every axis, as the buffers that exist show it."""
        bound = dict(sizes)
        for arg in specialization.args:
            buffer = self._buffers.get(_buffer_name(given[arg.name]))
            if isinstance(arg, Tensor) and buffer is not None and len(buffer.shape) == len(arg.axes):
                for axis, size in zip(arg.axes, buffer.shape, strict=True):
                    if isinstance(axis, str):
                        bound.setdefault(axis, size)
        return bound

    def _argument(
        self, specialization: Specialization, arg: Tensor | Scalar, given: Given, bound: Mapping[str, Size]
    ) -> Argument:
        spec, dtype = specialization.spec, specialization.dtype_of(arg)
        if isinstance(arg, Scalar):
            assert not isinstance(given, (Weight, Memory)), arg.name
            number = given if isinstance(given, str) or dtype != "float32" else float(given)
            return ScalarArgument(number, dtype)
        shape = tuple(bound[axis] if isinstance(axis, str) else axis for axis in arg.axes)
        role = "part" if arg.name in spec.partial_outputs else arg.role
        role = "inout" if role == "state" else role  # whose memory it is does not matter to the order of launches
        buffer = self._buffers.get(_buffer_name(given)) or self._declared(given, role, shape, dtype)
        assert buffer.dtype == dtype, f"{buffer} as {dtype}"
        early = arg.name in (*spec.early_reads, *spec.early_writes)
        return TensorArgument(buffer.name, role, early, _seen(buffer, shape))

    def _declared(self, given: Given, role: str, shape: tuple[Size, ...], dtype: str) -> Buffer:
        """A buffer that is named for the first time: a weight, an exchange's memory, or what this launch writes."""
        if isinstance(given, Weight):
            self.buffer(given.name, Kind.WEIGHT, shape, dtype, source=given.source)
        elif isinstance(given, Memory):
            self.buffer(given.name, given.kind, shape, dtype, of=given.of)
        else:
            assert role in ("out", "part"), f"{given} is read before anybody wrote it"
            self.buffer(str(given), Kind.WORKSPACE, shape, dtype)
        return self._buffers[_buffer_name(given)]


def _waiting(argument: Argument) -> Argument:
    return replace(argument, early=False) if isinstance(argument, TensorArgument) else argument


def _buffer_name(given: Given) -> str:
    return given.name if isinstance(given, (Weight, Memory)) else str(given)


def _seen(buffer: Buffer, shape: tuple[Size, ...]) -> tuple[Size, ...] | None:
    """`shape` where it is another one than the buffer's."""
    if shape == buffer.shape:
        return None
    assert buffer.strides is None and elements(shape) == elements(buffer.shape), f"{buffer} as {shape}"
    return shape


def elements(shape: Sequence[Size]) -> int:
    assert all(isinstance(size, int) for size in shape), shape
    return math.prod(int(size) for size in shape)


def nbytes(buffer: Buffer) -> int:
    return elements(buffer.shape) * DTYPE_BYTES[buffer.dtype]
