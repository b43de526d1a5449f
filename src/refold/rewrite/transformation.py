"""What a transformation is: called to apply it, asked to reverse itself, with marks on the nodes it changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch.fx import GraphModule, Node

from refold.errors import NotATransformation
from refold.record import call_notes
from refold.record.marks import marks_of, set_marks
from refold.record.stack import check_graph_module, history
from refold.rewrite.application import apply_transformation
from refold.rewrite.description import check_settings, signature_of, unset_additions
from refold.rewrite.reverse_calls import reverse_by_own_means, reverse_by_record


class Transformation(ABC):
    """Edits a graph. Subclasses write `transform`; it may edit as it likes, with any of torch.fx's own means, but must
    never write into a tensor that was there before. What it did is derived, recorded on the module, and can be undone.
    """

    preserves_computation: bool = False
    """A claim that the result computes the same; `refold.verify` grades it."""
    is_recorded: ClassVar[bool] = True
    """Whether a call records a change of its own; a composition's parts do that for it."""
    is_stand_in: ClassVar[bool] = False
    """Whether the class only stands for another one while a recipe is replayed, so that no recipe may name it."""

    def __post_init__(self) -> None:
        """Check the settings; a transformation that is a dataclass calls this when it is made."""
        check_settings(self)

    @abstractmethod
    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Edit a graph module and return it (or another one)."""

    def __call__(self, graph_module: GraphModule, lint_and_recompile: bool = True) -> GraphModule:
        """Apply the transformation; if anything is raised on the way, the module is as it was before."""
        return apply_transformation(self, check_graph_module(graph_module), lint_and_recompile)

    @property
    def signature(self) -> int:
        """A number that is equal for equal transformations (class and settings), in any process."""
        return signature_of(self)

    def __repr__(self) -> str:
        unset = unset_additions(self)
        settings = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if k not in unset)
        return f"{type(self).__name__}({settings})"

    def mark_as_transformed(self, node: Node) -> None:
        """Note on a node that this transformation made or changed it."""
        signature = _signature_during_call(self)
        left = tuple(mark for mark in marks_of(node) if abs(mark) != signature)
        set_marks(node, (*left, signature))

    def transformed(self, node: Node) -> bool:
        """Whether this transformation made or changed a node."""
        signature = self.signature
        return _is_marked(node, signature, _recorded_marks(node.graph.owning_module, signature))

    def get_transformed_nodes(self, graph_module: GraphModule) -> list[Node]:
        """The nodes that this transformation made or changed."""
        nodes = check_graph_module(graph_module).graph.nodes
        signature, recorded = self.signature, _recorded_marks(graph_module, self.signature)
        return [node for node in nodes if _is_marked(node, signature, recorded)]


class ReversibleTransformation(Transformation):
    """A transformation that can be asked to reverse itself. The default `reverse` undoes all its recorded changes; a
    `reverse` of one's own is run and compared with the record. Where nothing was transformed, nothing is reversed."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo every change of this transformation."""
        return reverse_by_record(self, graph_module, lint_and_recompile=False)

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, reverse: bool = False
    ) -> GraphModule:
        """Apply the transformation, or reverse it."""
        if not reverse:
            return super().__call__(graph_module, lint_and_recompile)
        return self._call_reverse(check_graph_module(graph_module), lint_and_recompile)

    def _call_reverse(self, gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
        if self.has_own_reverse:
            return reverse_by_own_means(self, gm, lint_and_recompile)
        return reverse_by_record(self, gm, lint_and_recompile)

    @property
    def has_own_reverse(self) -> bool:
        """Whether the author wrote a `reverse`."""
        return type(self).reverse is not ReversibleTransformation.reverse

    def mark_as_restored(self, node: Node) -> None:
        """Take this transformation's mark off a node."""
        if not self.transformed(node):
            raise ValueError(
                f"{node.name} was not marked as transformed by {self!r}, so it cannot be marked as restored."
            )
        left = tuple(mark for mark in marks_of(node) if abs(mark) != self.signature)
        recorded = node.name in _recorded_marks(node.graph.owning_module, self.signature)
        set_marks(node, (*left, -self.signature) if recorded else left)  # an explicit 'no longer' beats the record


def _signature_during_call(transformation: Transformation) -> int:
    known = call_notes.current().signatures
    if id(transformation) not in known:
        known[id(transformation)] = transformation.signature
    return known[id(transformation)]


def _is_marked(node: Node, signature: int, recorded: frozenset[str]) -> bool:
    marks = marks_of(node)
    return signature in marks or (node.name in recorded and -signature not in marks)


def _recorded_marks(gm: GraphModule | None, signature: int) -> frozenset[str]:
    """Marks as the history knows them: node metadata is lost by pickling."""
    past = () if gm is None else history(gm)
    return frozenset().union(*(change.marked for change in past if change.signature == signature))


def check_transformation(thing: object) -> Transformation:
    """The thing, if it is a transformation."""
    if isinstance(thing, Transformation):
        return thing
    if isinstance(thing, type) and issubclass(thing, Transformation):
        raise NotATransformation(
            f"the class {thing.__name__} was given where an instance is needed: {thing.__name__}()."
        )
    raise NotATransformation(f"a refold.Transformation is needed, and a {type(thing).__name__} was given.")
