"""What an object remembers between two calls, to tell a function of its arguments from one that keeps count."""

from __future__ import annotations

import inspect
import random
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import chain, islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

_MOST_VALUES = 5_000
_OPAQUE = (ModuleType, type, torch.nn.Module, PreTrainedTokenizerBase)


class Watch:
    """A look at one of the functions that a caller passes, to tell later whether it has changed."""

    def __init__(self, watched: Any, argument: str, advice: str) -> None:
        """Takes in what `watched` remembers.

        Args:
            argument: the argument that it was passed in.
            advice: why it must not change, and what to do.
        """
        self.watched = watched
        self._argument = argument
        self._advice = advice
        self._state = state_of(watched)

    def check(self) -> None:
        """Checks that nothing has changed since.

        Raises:
            ValueError: something has; the message names the function and its attributes.
        """
        now = state_of(self.watched)
        changed = sorted(name for name in self._state.keys() | now.keys() if self._state.get(name) != now.get(name))
        if changed:
            raise ValueError(
                f"{self._argument} holds {name_of(self.watched)}, which changed when it was called: "
                f"{', '.join(changed)}. {self._advice}"
            )


def name_of(function: Any) -> str:
    """Returns how a message calls a function, or an object that is called like one."""
    if isinstance(function, FunctionType | MethodType):
        return f"the function {function.__qualname__}"
    return type(function).__qualname__


def state_of(processor: Any) -> dict[str, list[Any]]:
    """Returns what a processor remembers, by attribute, in a form that `==` compares with a later one.

    Attributes of the object and its classes are taken, of a function its closure and defaults, and what these hold in
    turn, up to 5,000 values. Numbers, texts, arrays, tensors and random generators count by value, containers by what
    is in them, other objects by identity and their attributes; modules, models, tokenizers and classes by identity.
    """
    state: dict[str, list[Any]] = defaultdict(list)
    waiting = deque((_class_attributes(type(processor)) | _attributes(processor)).items())
    # The values are kept so that no id is given away twice.
    kept: dict[int, Any] = {id(processor): processor}
    # Breadth first: the attributes themselves come before the depths of a large table.
    for _ in range(_MOST_VALUES):
        if not waiting:
            break
        name, value = waiting.popleft()
        mark, parts = _look_at(value)
        state[name].append(mark)
        if id(value) not in kept:
            kept[id(value)] = value
            waiting.extend((name, part) for part in islice(parts, max(0, _MOST_VALUES - len(waiting))))
    return state


class _Same:
    """Equal to the same object only; holding it keeps its id from being given to another."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


class _TensorState:
    """Equal where a tensor was not written to, or was replaced by one with the same values (on another device, say)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        # A tensor made in inference mode counts no writes.
        self.version = None if tensor.is_inference() else tensor._version
        self.values = tensor.clone() if tensor.is_inference() else tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorState):
            return False
        if self.tensor is other.tensor and self.version is not None:
            return self.version == other.version
        if (self.values.shape, self.values.dtype) != (other.values.shape, other.values.dtype):
            return False
        mine, others = self.values.detach().cpu(), other.values.detach().cpu()
        return bool(((mine == others) | (mine != mine) & (others != others)).all())


def _look_at(value: Any) -> tuple[Any, Iterable[Any]]:
    """Returns what to compare of a value itself, and the values in it."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return (type(value), value), ()
    if isinstance(value, torch.Tensor):
        return _TensorState(value), ()
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape, value.tobytes()), ()
    if isinstance(value, torch.Generator):
        return _TensorState(value.get_state()), ()
    if isinstance(value, random.Random):
        return value.getstate(), ()
    if isinstance(value, np.random.Generator):
        return _Same(value), (value.bit_generator.state,)
    if isinstance(value, dict):
        return (type(value), len(value)), chain(chain.from_iterable(value.items()), _attributes(value).values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return (type(value), len(value)), chain(value, _attributes(value).values())
    if isinstance(value, _OPAQUE):
        return _Same(value), ()
    return _Same(value), _attributes(value).values()


def _attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, slots included, or what a function closes over and defaults to."""
    if isinstance(value, MethodType):
        return _attributes(value.__func__) | _attributes(value.__self__)
    found: dict[str, Any] = {}
    if isinstance(value, FunctionType):
        found["__defaults__"] = value.__defaults__
        members = {
            name: lambda cell=cell: cell.cell_contents
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        }
    else:
        members = {
            name: lambda member=member: member.__get__(value)
            for kind in type(value).__mro__
            for name, member in vars(kind).items()
            if inspect.ismemberdescriptor(member)
        }
    for name, read in members.items():
        try:
            found[name] = read()
        except (AttributeError, ValueError):
            # Not set yet.
            continue
    try:
        return found | vars(value)
    except TypeError:
        return found


def _class_attributes(kind: type) -> dict[str, Any]:
    """Returns what the objects of a class share."""
    shared: dict[str, Any] = {}
    for each in reversed(kind.__mro__[:-1]):
        shared |= {name: value for name, value in vars(each).items() if not name.startswith("__")}
    return shared
