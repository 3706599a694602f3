"""The words in which kernels tell that they waited in vain, looked at without waiting for the GPU.

Owns their copies on the host, and the list of all watches of this process, which is one rank. Graphs replay without
anything of ours on the host, and who is called before each step is the backbone's state, which does not know the draft:
so it asks all watches there are. Torch only.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch

from jitspark.errors import RankError

Name = TypeVar("Name", bound=Hashable)

_EVERY: "WeakValueDictionary[int, WordWatch[Any]]" = WeakValueDictionary()  # the oldest first


class WordWatch(Generic[Name]):
    """`words`: by any name, one element each, all of one dtype; a kernel writes something else than 0 once it gives up.

    `note(name)` behind each launch that may write the word copies it to the host, also under capture: then each replay
    does. `require_heard` reads what has come there. A step that went wrong is thus told of before the next one, or
    before the one after that where the host is a step ahead of the GPU. `problem` makes the error of a word.
    """

    def __init__(self, words: Mapping[Name, torch.Tensor], problem: Callable[[int], RankError]) -> None:
        self._words, self._problem = dict(words), problem
        first = next(iter(self._words.values()), torch.empty(0, dtype=torch.int32))
        # of the words' own dtype: another one would be converted on the way, by a kernel and in memory of its own
        self._copies = torch.zeros(len(self._words), dtype=first.dtype, pin_memory=first.is_cuda)
        self._copy_of = dict(zip(self._words, self._copies.split(1), strict=False))
        _EVERY[id(self)] = self

    def note(self, name: Name) -> None:
        """Copy a word to the host, on the current stream; names without a word are none of ours."""
        if name in self._words:
            self._copy_of[name].copy_(self._words[name], non_blocking=True)

    def require_heard(self) -> None:
        """Raise the error of a word that has come and is not 0. Never waits."""
        if self._copies.any():
            raise self._problem(int(self._copies[self._copies != 0][0]))


def require_all_heard() -> None:
    """`require_heard` of every watch of this process: the backbone's, the draft's, the sampling loop's."""
    for watch in tuple(_EVERY.values()):
        watch.require_heard()
