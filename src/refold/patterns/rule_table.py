"""A table of rules for operators: entered by a decorator, found by the bare name of what a node calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from torch.fx import Node

from refold.graph.targets import name_of

Rule = TypeVar("Rule", bound=Callable[..., object])


class RuleTable(Generic[Rule]):
    """One function for each operator."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}

    def __call__(self, *names: str) -> Callable[[Rule], Rule]:
        """A decorator of the rule for calls of these names."""

        def enter(rule: Rule) -> Rule:
            self._rules.update(dict.fromkeys(names, rule))
            return rule

        return enter

    def of(self, node: Node) -> Rule | None:
        """The rule for what a node calls, if there is one."""
        return self.named(name_of(node))

    def named(self, name: str) -> Rule | None:
        """The rule for calls of this name."""
        return self._rules.get(name)
