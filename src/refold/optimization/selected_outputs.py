"""Only some of a model's outputs: the others come back as None, and what only they needed is not computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from refold.errors import BadExample


@dataclasses.dataclass(frozen=True)
class SelectedOutputs:
    """Which outputs are wanted, by key or by position."""

    wanted: tuple[str | int, ...]

    def of(self, result: Any) -> Any:
        """A result with None in place of what is not wanted."""
        self._check(result)
        if isinstance(result, Mapping):
            parts = {key: value if key in self.wanted else None for key, value in result.items()}
            return type(result)(**parts) if dataclasses.is_dataclass(result) else type(result)(parts)  # type: ignore[call-arg]
        places = [value if place in self.wanted else None for place, value in enumerate(result)]
        return result._make(places) if hasattr(result, "_make") else type(result)(places)

    def called(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with these outputs alone."""
        return lambda *args, **kwargs: self.of(run(*args, **kwargs))

    def _check(self, result: Any) -> None:
        if not isinstance(result, Mapping | Sequence):
            raise BadExample(f"outputs={list(self.wanted)!r} selects among several, and the model gives one.")
        known = list(result) if isinstance(result, Mapping) else list(range(len(result)))
        unknown = [name for name in self.wanted if name not in known]
        if unknown:
            raise BadExample(f"the model has no output {unknown[0]!r}; it gives {', '.join(map(str, known))}.")

    def cut(self, gm: GraphModule) -> None:
        """Drop from a captured graph what is not wanted, and what only that needed."""
        output = next(iter(gm.graph.find_nodes(op="output")))
        result = output.args[0]
        if isinstance(result, Node):  # the call of a class, such as a ModelOutput
            result.kwargs = {name: value if name in self.wanted else None for name, value in result.kwargs.items()}
            result.args = tuple(value if place in self.wanted else None for place, value in enumerate(result.args))
        elif isinstance(result, Mapping):
            output.args = ({name: value if name in self.wanted else None for name, value in result.items()},)
        else:
            output.args = (tuple(value if place in self.wanted else None for place, value in enumerate(result)),)
        gm.graph.eliminate_dead_code()
        gm.recompile()
