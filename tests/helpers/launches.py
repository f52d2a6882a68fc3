"""The operations that would launch a kernel on a GPU: all but views, and memory without values."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_VIEWS = ("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split")
_MORE_VIEWS = ("squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view")
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_NO_KERNEL = frozenset((*_VIEWS, *_MORE_VIEWS, *_EMPTY, "lift_fresh", "_assert_async"))


class Launches(TorchDispatchMode):
    """Counts such operations by name, below autograd: `with Launches() as launches: …`."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return self.by_name.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _NO_KERNEL:
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))
