"""A plan's buffers bound to tensors: the caller's, checked, and the plan's own places in one allocation.

Whatever does not fit is refused before anything is launched, with one error that names the launch, the argument, what
was found and what was needed. Imports torch only when something is bound.
"""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jitspark.errors import BindingError
from jitspark.key import plain
from jitspark.plans.launch_signature import Problem, Signature, as_compact, dtype_name
from jitspark.plans.plan import Buffer, Kind, Launch, Plan, ScalarArgument, Size, TensorArgument

if TYPE_CHECKING:
    import torch

CALLERS = (Kind.INPUT, Kind.WEIGHT, Kind.KV_CACHE)  # whose tensors the caller brings
IN_SYMMETRIC_MEMORY = (Kind.SYMMETRIC, Kind.SIGNAL)
PLACE = 16  # bytes; what every kernel's vectors are aligned to

Tensors = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """What all ranks map.

    local: this rank's bytes, uint8, zero at first. addresses: where each rank's begin in this rank's address space, in
    rank order.
    """

    local: "torch.Tensor"
    addresses: tuple[int, ...]


def local_memory(plan: Plan, device: "torch.device | str") -> SymmetricMemory:
    """Symmetric memory of a rank alone: every peer's address is its own, so exchanges become local copies."""
    import torch

    memory = torch.zeros(max(plan.symmetric_bytes, 1), dtype=torch.uint8, device=device)
    return SymmetricMemory(memory, (memory.data_ptr(),) * plan.tp)


class Binding:
    """Tensors and numbers for every argument of a plan's launches.

    `signatures` are those of the launches that kernels of ours serve, by launch name; the others are held against the
    plan alone. `numbers` gives the scalars that the plan leaves open, `sizes` the sizes that no tensor shows.
    """

    def __init__(
        self,
        plan: Plan,
        device: "torch.device | str",
        *,
        signatures: Mapping[str, Signature] | None = None,
        numbers: Mapping[str, float | int] | None = None,
        sizes: Mapping[str, int] | None = None,
        arena: "torch.Tensor | None" = None,
        symmetric: SymmetricMemory | None = None,
    ) -> None:
        import torch

        self.plan = plan
        self.device = torch.empty(0, device=device).device  # "cuda" stands for the current one
        self._signatures = signatures or {}
        self._numbers = dict(numbers or {})
        self._buffers = plan.buffer_named()
        self.sizes = dict(sizes or {})
        self._launches_of = _launches_of(plan)
        self._good: set[tuple[Any, ...]] = set()
        self.symmetric = symmetric
        self._given_arena = arena
        self.arena: torch.Tensor | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        if plan.tp > 1 and self._numbers.get("rank", 0) not in range(plan.tp):  # kernels store by it
            raise self._error("rank", repr(self._numbers["rank"]), f"one from 0 to {plan.tp - 1}")

    def bind(self, tensors: Tensors, check: Callable[[Mapping[str, int]], None] | None = None) -> tuple[Launch, ...]:
        """Put these tensors in the places of the buffers that they are named after, and return the launches touched.

        Once all of the caller's tensors are there, the plan's own are made, and `check` may refuse the sizes. Raises
        BindingError and changes nothing when one does not fit.
        """
        for name, tensor in tensors.items():
            self._check_buffer(name, tensor)
        candidate = {**self.tensors, **{name: as_compact(tensor) for name, tensor in tensors.items()}}
        sizes = {**self.sizes, **self._named_sizes(tensors)}
        touched = tuple({each.name: each for name in tensors for each in self._launches_of.get(name, ())}.values())
        arena = self.arena
        if not self._missing(candidate):
            if check is not None:
                check(sizes)
            if arena is None:
                arena = self._make_arena()
                candidate |= self._own(candidate, sizes, arena)
            for launch in self.plan.launches if self.arena is None else touched:
                self._check_launch(launch, candidate, sizes)
        self.tensors, self.sizes, self.arena = candidate, sizes, arena
        return touched

    def require_complete(self) -> None:
        """Raise BindingError that names a buffer which nothing is bound to."""
        missing = self._missing(self.tensors)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise self._error(missing[0], f"no tensor for it{more}", "one for each of the plan's buffers")

    def arguments(self, launch: Launch) -> list[Any]:
        """What `launch` is called with."""
        return [self._value(argument, self.tensors, self.sizes) for argument in launch.arguments]

    def _missing(self, tensors: Tensors) -> list[str]:
        return [each.name for each in self.plan.buffers if each.kind in CALLERS and each.name not in tensors]

    def _check_buffer(self, name: str, tensor: "torch.Tensor") -> None:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.kind not in (*CALLERS, Kind.OUTPUT):
            raise self._error(name, "a tensor for it", f"tensors for {', '.join(CALLERS)} buffers of the plan")
        unlike = _unlike_memory(tensor)
        if unlike is not None:
            raise self._error(name, unlike, "a tensor whose values lie at its address")
        if tensor.device != self.device:
            raise self._error(name, f"a tensor on {tensor.device}", f"one on {self.device}")
        if dtype_name(tensor) != buffer.dtype:
            raise self._error(name, f"dtype {dtype_name(tensor)}", f"dtype {buffer.dtype}")
        wanted = [self._numbers.get(size, size) if isinstance(size, str) else size for size in buffer.shape]
        fits = len(tensor.shape) == len(wanted) and all(
            isinstance(size, str) or size == found for size, found in zip(wanted, tensor.shape, strict=True)
        )
        if not fits:
            raise self._error(name, f"shape {list(tensor.shape)}", f"shape {wanted}")
        if buffer.strides is None and not tensor.is_contiguous():
            raise self._error(name, f"strides {list(tensor.stride())}", "a compact row-major tensor")

    def _named_sizes(self, tensors: Tensors) -> dict[str, int]:
        """Sizes that the plan knows by name, as these tensors have them."""
        pairs = ((self._buffers[name].shape, tensor.shape) for name, tensor in tensors.items())
        sizes = (size for shape, real in pairs for size in zip(shape, real, strict=True))
        return {name: found for name, found in sizes if isinstance(name, str)}

    def _own(self, given: Tensors, sizes: Mapping[str, int], arena: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        """The buffers that the caller does not bring: in one arena, outputs, and what lies in symmetric memory."""
        import torch

        made: dict[str, torch.Tensor] = {}
        for buffer in self.plan.buffers:
            if buffer.name in given or buffer.kind in CALLERS:
                continue
            if buffer.kind == Kind.OUTPUT:
                shape = self._shape(buffer, sizes)
                made[buffer.name] = torch.zeros(shape, dtype=getattr(torch, buffer.dtype), device=self.device)
            elif buffer.kind == Kind.WORKSPACE:
                made[buffer.name] = self._place(buffer, sizes, arena)
            elif buffer.kind in IN_SYMMETRIC_MEMORY:
                made[buffer.name] = self._place(buffer, sizes, self._symmetric().local)
            else:
                made[buffer.name] = self._addresses(buffer, sizes)
        return made

    def _make_arena(self) -> "torch.Tensor":
        import torch

        size = self.plan.workspace_bytes
        given = self._given_arena
        if given is None:
            return torch.zeros(size, dtype=torch.uint8, device=self.device)
        if not self._has_places(given, size):
            raise self._error("workspace", _bytes_of(given), self._bytes_needed(size))
        return given

    def _has_places(self, memory: "torch.Tensor", size: int) -> bool:
        """Whether buffers of any dtype can lie in its first `size` bytes."""
        plain_bytes = dtype_name(memory) == "uint8" and memory.dim() == 1 and memory.is_contiguous()
        return plain_bytes and memory.device == self.device and len(memory) >= size and not memory.data_ptr() % PLACE

    def _bytes_needed(self, size: int) -> str:
        return f"{size} bytes (uint8, one axis, compact, at a multiple of {PLACE}) on {self.device}"

    def _symmetric(self) -> SymmetricMemory:
        memory, size, ranks = self.symmetric, self.plan.symmetric_bytes, self.plan.tp
        if memory is None or len(memory.addresses) != ranks or not self._has_places(memory.local, size):
            found = "none" if memory is None else f"{_bytes_of(memory.local)}, of {len(memory.addresses)} ranks"
            raise self._error("symmetric memory", found, f"{self._bytes_needed(size)}, of {ranks} ranks")
        return memory

    def _addresses(self, buffer: Buffer, sizes: Mapping[str, int]) -> "torch.Tensor":
        import torch

        assert buffer.of is not None
        offset = self._buffers[buffer.of].offset
        found = [address + offset for address in self._symmetric().addresses]
        return torch.tensor(found, dtype=torch.int64, device=self.device).view(self._shape(buffer, sizes))

    def _place(self, buffer: Buffer, sizes: Mapping[str, int], arena: "torch.Tensor") -> "torch.Tensor":
        import torch

        dtype = getattr(torch, buffer.dtype)
        shape = self._shape(buffer, sizes)
        size = math.prod(shape) * dtype.itemsize
        return arena[buffer.offset : buffer.offset + size].view(dtype).view(shape)

    def _shape(self, buffer: Buffer, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return self._resolved(buffer.name, buffer.shape, sizes)

    def _resolved(self, name: str, shape: Sequence[Size], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """A buffer's shape, its sizes with names looked up."""
        known = {**sizes, **self._numbers}
        unknown = [size for size in shape if isinstance(size, str) and size not in known]
        if unknown:
            raise self._error(name, f"no value for its size {unknown[0]}", "a size for every name")
        return tuple(int(known[size]) if isinstance(size, str) else size for size in shape)

    def _value(self, argument: TensorArgument | ScalarArgument, tensors: Tensors, sizes: Mapping[str, int]) -> Any:
        if isinstance(argument, TensorArgument):
            tensor = tensors[argument.buffer]
            shape = argument.shape
            return tensor if shape is None else tensor.view(self._resolved(argument.buffer, shape, sizes))
        if not isinstance(argument.value, str):
            return argument.value
        known = {**sizes, **self._numbers}
        if argument.value not in known:
            raise self._error(argument.value, "no value for this number", "one for each number the plan leaves open")
        return known[argument.value]

    def _check_launch(self, launch: Launch, tensors: Tensors, sizes: Mapping[str, int]) -> None:
        """Hold the launch against its kernel's signature; launches alike in everything are looked at once."""
        values = [self._value(argument, tensors, sizes) for argument in launch.arguments]
        signature = self._signatures.get(launch.name)
        if signature is None:
            return
        alike = (id(signature), *map(_looks, launch.arguments, values))
        if alike in self._good:
            return
        problem = _disagreement(launch, signature) or signature.problem(values)
        if problem is not None:
            raise self._launch_error(launch, problem)
        self._good.add(alike)

    def _launch_error(self, launch: Launch, problem: Problem) -> BindingError:
        names = [arg.name for arg in self._signatures[launch.name].args]
        index = names.index(problem.argument) if problem.argument in names else -1
        argument = launch.arguments[index] if 0 <= index < len(launch.arguments) else None
        buffer = f" ({argument.buffer})" if isinstance(argument, TensorArgument) else ""
        return BindingError(
            where=f"{title(self.plan)}, launch {launch.name}, argument {problem.argument}{buffer}",
            found=problem.found,
            needed=problem.needed,
            remedy="Bind the tensors that this plan was made for, or make the plan anew.",
        )

    def _error(self, name: str, found: str, needed: str) -> BindingError:
        users = self._launches_of.get(name, ())
        place = f", launch {users[0].name}" if users else ""
        return BindingError(
            where=f"{title(self.plan)}{place}, {name}",
            found=found,
            needed=needed,
            remedy="Bind the tensors that this plan was made for, or make the plan anew.",
        )


def title(plan: Plan) -> str:
    """A plan in an error's words."""
    return f"{plan.stage} plan of {plan.geometry} at TP {plan.tp}, {plan.rows} rows"


def _bytes_of(memory: "torch.Tensor") -> str:
    off = memory.data_ptr() % PLACE
    return f"{list(memory.shape)} of {dtype_name(memory)} on {memory.device}, {off} bytes off a multiple of {PLACE}"


def _unlike_memory(value: Any) -> str | None:
    """What `value` is, if a kernel that is given its address would not find its values there."""
    import torch

    if not isinstance(value, torch.Tensor):
        return f"the {type(value).__name__} {reprlib.repr(value)}"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}"
    return "a view that negates what it reads" if value.is_neg() else None


def _launches_of(plan: Plan) -> dict[str, tuple[Launch, ...]]:
    found: dict[str, dict[str, Launch]] = {}
    for launch in plan.launches:
        for argument in launch.tensors():
            found.setdefault(argument.buffer, {})[launch.name] = launch
    return {name: tuple(launches.values()) for name, launches in found.items()}


def _disagreement(launch: Launch, signature: Signature) -> Problem | None:
    """Where the plan's own words about a launch are not those of the entry: its statics, and what it writes."""
    if plain(dict(launch.statics)) != dict(signature.statics):
        return Problem("all", f"statics {dict(launch.statics)}", f"those of its entry, {dict(signature.statics)}")
    for argument, arg in zip(launch.arguments, signature.args, strict=False):
        role = getattr(arg, "role", None)
        if isinstance(argument, TensorArgument) and role is not None and role not in _SAME_ROLE[argument.role]:
            return Problem(arg.name, f"role {argument.role}", f"role {role}")
    return None


# What a kernel may call that which the plan calls so: a part of a buffer is written, and the rest stays.
_SAME_ROLE = {"in": ("in",), "out": ("out",), "inout": ("inout", "state"), "part": ("inout", "out")}


def _looks(argument: TensorArgument | ScalarArgument, value: Any) -> Sequence[Any]:
    """All that a signature looks at."""
    if isinstance(argument, ScalarArgument):
        return (type(value), value)
    return (argument.role, value.dtype, tuple(value.shape), value.stride(), value.data_ptr() % 1024)
