"""The laws are tested: each deliberately broken transformation must be caught, by the law that is its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

import refold
from refold import ReversibleTransformation, Transformation
from refold.examples import attention_layers, layers
from refold.graph.view import GraphView
from refold.rewrite.editor import Editor
from refold.rewrite.rule import ReversibleRewrite, Site, Skip
from refold.testing import LAWS, LawBroken, check_law, check_laws
from refold.testing.faults import check_faults
from refold.testing.laws import graph_of
from refold.transformations.fuse_batch_norm_2d_in_conv_2d import FuseBatchNorm2dInConv2d
from refold.transformations.merge_linears import MergeLinears
from refold.weights import Concatenate, FoldBatchNormInLayer


def caught(law: str, t: Transformation, example: tuple[nn.Module, tuple[Any, ...]] | None = None) -> str:
    """What a law says about a broken transformation."""
    with pytest.raises(LawBroken) as broken:
        check_law(LAWS[law], t, *(example or attention_layers.attention()))
    return str(broken.value)


class _Broken(Transformation):
    preserves_computation = True


def test_bias_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FoldBatchNormInLayer.forward

    def wrong(self: FoldBatchNormInLayer, old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        new = right(self, old)
        if "bias" in old:
            shift = self.scale(old)[1]
            new["bias"] = (old["bias"].double() + shift).to(new["bias"].dtype)
        return new

    monkeypatch.setattr(FoldBatchNormInLayer, "forward", wrong)
    assert "rounding explains" in caught("L2", FuseBatchNorm2dInConv2d(), layers.conv_norm())


def test_epsilon_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of one part in a million passes every usual tolerance, and not this one."""
    right = FoldBatchNormInLayer.scale

    def wrong(self: FoldBatchNormInLayer, values: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return right(FoldBatchNormInLayer(self.eps * 0.9, self.channel, self.first, self.guard), values)

    monkeypatch.setattr(FoldBatchNormInLayer, "scale", wrong)
    assert "rounding explains" in caught("L2", FuseBatchNorm2dInConv2d(), layers.conv_norm())


def test_swapped_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Concatenate.inverse

    def wrong(self: Concatenate, new: dict[str, torch.Tensor], kept: Any) -> dict[str, torch.Tensor]:
        return {"0": right(self, new, kept)["1"], "1": right(self, new, kept)["0"]}

    monkeypatch.setattr(Concatenate, "inverse", wrong)
    assert "tensors" in caught("L4", MergeLinears(), layers.gated())
    assert "lost or distorted" in caught("L13", MergeLinears(), layers.gated())


def test_dropped_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refold.rewrite.application.push", lambda *args, **kwargs: None)
    assert "recorded nothing" in caught("L15", MergeLinears())


def test_dropped_table_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    from refold.record import difference

    right = difference._changed_tables

    def wrong(*args: Any) -> Any:
        return {key: change for key, change in right(*args).items() if key[1] != "_modules"}

    monkeypatch.setattr("refold.record.difference._changed_tables", wrong)
    with pytest.raises((LawBroken, Exception)):
        check_law(LAWS["L3"], MergeLinears(), *layers.gated())


class WritesInPlace(_Broken):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        for parameter in graph_module.parameters():
            parameter.data.mul_(2)  # through .data: version counters do not see it
        return graph_module


def test_in_place_write_that_no_counter_sees() -> None:
    assert "eager model was changed" in caught("L14", WritesInPlace())
    assert "rounding explains" in caught("L2", WritesInPlace())


class MarksOnly(_Broken):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.nodes:
            self.mark_as_transformed(node)
        return graph_module


def test_mark_without_change() -> None:
    assert "changed nothing" in caught("L15", MarksOnly())


class Nothing(_Broken):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


def test_no_operation() -> None:
    assert "changed nothing" in caught("L15", Nothing())


class DropsBias(MergeLinears):
    """Its own reverse gives the layers back without their biases."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        super().reverse(graph_module)
        for module in graph_module.modules():
            if isinstance(module, nn.Linear):
                module.register_parameter("bias", None)
        return graph_module


class DropsName(refold.ChangeTrueDivToMulByInverse):
    """Its own reverse computes a constant that is off by one rounding."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            import math
            import operator

            node.target, node.args = operator.truediv, (node.args[0], math.nextafter(1 / node.args[1], math.inf))
        return graph_module


@pytest.mark.parametrize("t", [DropsBias(), DropsName()], ids=repr)
def test_reverse_that_drops_something(t: ReversibleTransformation) -> None:
    gm = graph_of(attention_layers.attention()[0])
    t(gm)
    code = gm.code
    with pytest.raises(refold.ReverseMismatch):
        t(gm, reverse=True)
    assert gm.code == code and len(refold.history(gm)) == 1


@dataclass(frozen=True, kw_only=True, repr=False)
class Unstable(ReversibleRewrite):
    """Never has enough: a second call rewrites again."""

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        relus = [n for n in view.nodes if n.target is torch.relu]
        if len(relus) % 3 != 2:
            yield Site((view.nodes[-1],), "one more", None)

    def rewrite(self, site: Site, edit: Editor) -> None:
        output = site.nodes[0]
        inner = output.args[0]
        output.args = (edit.call(output, torch.add, edit.call(output, torch.relu, inner), inner),)


class Again(_Broken):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        output = next(iter(reversed(graph_module.graph.nodes)))
        with graph_module.graph.inserting_before(output):
            output.args = (graph_module.graph.call_function(torch.clone, output.args),)
        return graph_module


def test_not_idempotent() -> None:
    assert "second time" in caught("L7", Again())


def test_changes_what_it_does_not_match() -> None:
    assert "computes nothing" in caught("L1", Again())


def test_wrong_computation() -> None:
    assert "rounding explains" in caught("L2", Unstable(), layers.gated())


class Restless(_Broken):
    """Its signature is another one in every instance."""

    def __init__(self) -> None:
        self.key = object()

    @property
    def signature(self) -> int:
        return id(self)

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return MergeLinears().transform(graph_module)


def test_signature_of_an_instance() -> None:
    assert "another signature" in caught("L9", Restless())


class EditsEager(_Broken):
    """Edits a module that the eager model shares."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.out.extra = 1
        graph_module.out.bias = None
        return graph_module


def test_eager_model_edited() -> None:
    assert "eager model was changed" in caught("L14", EditsEager())


def test_not_atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refold.record.snapshot.Snapshot.restore", lambda self, gm: None)
    assert "a fault at" in caught("L10", MergeLinears())
    assert list(check_faults(MergeLinears(), graph_of(layers.gated()[0]), most=5, error=KeyboardInterrupt))


def test_shared_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refold.record.change.Change.__deepcopy__", lambda self, memo: self)
    assert "shares a record" in caught("L11", MergeLinears())


def test_lost_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from refold.weights.maps import MapRecord

    right = MapRecord.recover

    def wrong(self: MapRecord, current: dict[str, torch.Tensor], weights: str = "carry") -> dict[str, torch.Tensor]:
        return {k: v * 0 for k, v in right(self, current, weights).items()}

    monkeypatch.setattr(MapRecord, "recover", wrong)
    assert "lost or distorted" in caught("L13", MergeLinears())


def test_compose_that_forgets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from refold.rewrite.composition import Composition

    right = Composition.transform

    def wrong(self: Composition, graph_module: GraphModule) -> GraphModule:
        return right(Composition(*self.transformations[:1]), graph_module)

    monkeypatch.setattr(Composition, "transform", wrong)
    assert "differs from step by step" in caught("L8", MergeLinears())


def test_merged_layer_without_a_recorded_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refold.rewrite.recorded_values.RecordedValues.record", lambda self, node: None)
    assert "has no recorded value" in caught("L16", MergeLinears(), layers.gated())


def test_merged_layer_with_the_value_of_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from refold.rewrite.recorded_values import RecordedValues

    right = RecordedValues.record

    def wrong(self: RecordedValues, node: Node) -> None:
        right(self, node)
        if node.op == "call_module":
            node.meta["val"] = node.meta["val"][..., :1]

    monkeypatch.setattr(RecordedValues, "record", wrong)
    assert "its recorded value is" in caught("L16", MergeLinears(), layers.gated())


def test_merged_layer_from_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refold.rewrite.editor.copy_place", lambda source, node: None)
    assert "has no nn_module_stack of what it replaces" in caught("L16", MergeLinears(), layers.gated())


def test_without_examples() -> None:
    with pytest.raises(LawBroken, match="no examples"):
        check_laws(Nothing())


class NeedsRelu(_Broken):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.relu.inplace = True
        return graph_module


def test_raises_where_nothing_matches() -> None:
    assert "it raised AttributeError: 'Identity' object has no attribute 'relu'" in caught("L1", NeedsRelu())


class FindEdits(ReversibleRewrite):
    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        for node in view.nodes:
            if node.target == "softmax":
                node.target = "log_softmax"
                yield Skip(node, "it is edited at once")

    def rewrite(self, site: Site, edit: Editor) -> None:
        raise NotImplementedError


def test_finding_that_edits() -> None:
    assert "edits the module, and must only look at it" in caught("L15", FindEdits())


@pytest.mark.parametrize("thing", [MergeLinears, None], ids=["class", "nothing"])
def test_not_a_transformation(thing: Any) -> None:
    with pytest.raises(refold.NotATransformation):
        check_laws(thing)


def test_new_process_that_finds_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from refold.testing import check_new_process

    def wrong(cases: list[Any]) -> list[dict[str, Any]]:
        return [{"code": "other"} for _ in cases]

    monkeypatch.setattr("refold.testing.laws.reverse_in_new_process", wrong)
    with pytest.raises(LawBroken, match="L6"):
        check_new_process([(MergeLinears(), *copy.deepcopy(layers.gated()))])
