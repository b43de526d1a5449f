"""Transformations as passes of torch's own machinery: its pass manager, and the compiler inductor."""

from __future__ import annotations

import functools
from typing import Any

from torch.fx import Graph, GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from refold._version import __version__
from refold.errors import RefoldError
from refold.record.stack import attach, detach, history
from refold.rewrite.transformation import Transformation, check_transformation


class FxPass(PassBase):
    """A transformation as a pass for `torch.fx.passes.infra.pass_manager.PassManager`.

    The pass says truly whether it changed something, and what it did stays on the module's history: `refold.undo`
    works behind the pass manager as everywhere.
    """

    def __init__(self, transformation: Transformation) -> None:
        self.transformation = check_transformation(transformation)

    def call(self, graph_module: GraphModule) -> PassResult:
        """Apply the transformation."""
        before = len(history(graph_module))
        output = self.transformation(graph_module)
        return PassResult(output, output is not graph_module or len(history(output)) != before)

    def __repr__(self) -> str:
        return f"FxPass({self.transformation!r})"


def as_fx_pass(transformation: Transformation) -> FxPass:
    """A pass that `PassManager` takes: `PassManager([as_fx_pass(MergeLinears())])(gm).graph_module`."""
    return FxPass(transformation)


def as_inductor_pass(transformation: Transformation) -> Any:
    """A custom graph pass for inductor, with a cache key of its own.

        torch.compile(model, options={"post_grad_custom_pre_pass": as_inductor_pass(RemoveNoOps())})

    Inductor's graphs hold ATen calls, and the weights are inputs of the graph, so only rewrites that need no weights
    find something to do there. Inductor throws its graphs away, so no undo record is kept.
    """
    return _pass_class()(check_transformation(transformation))


@functools.cache
def _pass_class() -> type:
    """The class, made when it is first needed: importing inductor takes seconds."""
    from torch._inductor.custom_graph_pass import CustomGraphPass  # the only public way in has an underscore

    class InductorPass(CustomGraphPass):
        """A transformation that inductor runs on the graphs it compiles."""

        def __init__(self, transformation: Transformation) -> None:
            self.transformation = transformation

        def __call__(self, graph: Graph) -> None:
            _apply_to_graph(self.transformation, graph)

        def uuid(self) -> str:
            """Equal for equal transformations of one Refold, so that inductor may reuse what it compiled."""
            return f"refold {__version__} {self.transformation.signature}"

        def __repr__(self) -> str:
            return f"InductorPass({self.transformation!r})"

        def __reduce__(self) -> Any:
            return (as_inductor_pass, (self.transformation,))

    return InductorPass


def _apply_to_graph(transformation: Transformation, graph: Graph) -> None:
    gm = graph.owning_module
    if gm is None:
        raise RefoldError(f"{transformation!r} needs a graph that belongs to a module, and this one does not.")
    past = detach(gm)
    try:
        output = transformation(gm, lint_and_recompile=False)
    finally:
        detach(gm)
        attach(gm, past)
    if output is not gm:
        raise RefoldError(f"{transformation!r} returns another module, and inductor wants its own graph edited.")
    graph.lint()
