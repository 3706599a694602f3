"""What a spec demands of its sizes, as values that can be printed, hashed and compared, each with its reason.

A constraint compares amounts: a number, an axis or a static by name, or arithmetic on these with `+ - * //`, `min`,
`max` and `ceil_div`, such as "128 * (num_heads + num_kv_heads)". It is not checked until all its names have values, and
not at all in specializations where the static of `when=(static, value)` has another one.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from jitspark.errors import SpecError

Amount = int | str
When = tuple[str, bool | int | float | str] | None
Evaluate = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Divisible:
    """`name` is a multiple of `by`."""

    name: str
    by: Amount
    because: str
    when: When = None

    def broken(self, values: Mapping[str, Any]) -> str | None:
        return _broken(self, self.by, values, lambda found, by: by != 0 and found % by == 0, "is not divisible by")


@dataclass(frozen=True, slots=True)
class AtMost:
    """`name` is at most `bound`."""

    name: str
    bound: Amount
    because: str
    when: When = None

    def broken(self, values: Mapping[str, Any]) -> str | None:
        return _broken(self, self.bound, values, operator.le, "is more than")


@dataclass(frozen=True, slots=True)
class AtLeast:
    """`name` is at least `bound`."""

    name: str
    bound: Amount
    because: str
    when: When = None

    def broken(self, values: Mapping[str, Any]) -> str | None:
        return _broken(self, self.bound, values, operator.ge, "is less than")


@dataclass(frozen=True, slots=True)
class Equals:
    """`name` is `to`."""

    name: str
    to: Amount
    because: str
    when: When = None

    def broken(self, values: Mapping[str, Any]) -> str | None:
        return _broken(self, self.to, values, operator.eq, "is not")


@dataclass(frozen=True, slots=True)
class OneOf:
    """`name` is one of `values`."""

    name: str
    values: tuple[int, ...]
    because: str
    when: When = None

    def broken(self, values: Mapping[str, Any]) -> str | None:
        found, _ = _compared(self, 0, values)
        if found is None or found in self.values:
            return None
        return f"{self.name}={found} is none of {', '.join(map(str, self.values))} ({self.because})"


Constraint = Divisible | AtMost | AtLeast | Equals | OneOf
KINDS: Mapping[str, Callable[..., Constraint]] = {kind.__name__: kind for kind in get_args(Constraint)}


def names_in(constraint: Constraint) -> Iterator[str]:
    """Every axis and static that a constraint speaks of. Raises SpecError for an amount that cannot be read."""
    for amount in (constraint.name, getattr(constraint, _OTHER_SIDE.get(type(constraint), "name"))):
        if isinstance(amount, str):
            _evaluator(amount)  # refuses what it cannot read
            yield from (
                node.id
                for node in ast.walk(ast.parse(amount))
                if isinstance(node, ast.Name) and node.id not in _FUNCTIONS
            )
    if constraint.when is not None:
        yield constraint.when[0]


_OTHER_SIDE = {Divisible: "by", AtMost: "bound", AtLeast: "bound", Equals: "to"}


def _compared(constraint: Constraint, amount: Amount, values: Mapping[str, Any]) -> tuple[Any, Any]:
    """What both sides come to; None for one whose names have no values, or where the constraint does not apply."""
    if constraint.when is not None and values.get(constraint.when[0]) != constraint.when[1]:
        return None, None
    return _value(constraint.name, values), _value(amount, values)


def _broken(
    constraint: Constraint,
    amount: Amount,
    values: Mapping[str, Any],
    holds: Callable[[Any, Any], bool],
    unlike: str,
) -> str | None:
    """Why `constraint` does not hold between its name and `amount`; None where it does, or cannot be said yet."""
    found, other = _compared(constraint, amount, values)
    if found is None or other is None or holds(found, other):
        return None
    return f"{constraint.name}={found} {unlike} {_told(amount, other)} ({constraint.because})"


def _value(amount: Amount, values: Mapping[str, Any]) -> Any:
    if isinstance(amount, int):
        return amount
    if amount in values:
        return values[amount]
    try:
        return _evaluator(amount)(values)
    except KeyError:
        return None


def _told(amount: Amount, value: Any) -> str:
    return str(value) if isinstance(amount, int) else f"{amount} = {value}"


def _ceil_div(amount: int, by: int) -> int:
    return -(-amount // by)


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {"min": min, "max": max, "ceil_div": _ceil_div}


@cache
def _evaluator(amount: str) -> Evaluate:
    try:
        return _reader(ast.parse(amount, mode="eval").body)
    except (SyntaxError, ValueError):
        raise SpecError(
            where="constraint",
            found=f"the amount {amount!r}",
            needed="names and whole numbers with + - * //, and min, max and ceil_div of two amounts",
            remedy="Mend the spec's constraint.",
        ) from None


def _reader(node: ast.expr) -> Evaluate:
    match node:
        case ast.Constant(value=int() as number):
            return lambda _: number
        case ast.Name(id=name):
            return lambda values: values[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _applied(_OPERATORS[type(op)], left, right)
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in _FUNCTIONS:
            return _applied(_FUNCTIONS[name], left, right)
    raise ValueError(ast.dump(node))


def _applied(function: Callable[[Any, Any], Any], left: ast.expr, right: ast.expr) -> Evaluate:
    first, second = _reader(left), _reader(right)
    return lambda values: function(first(values), second(values))
