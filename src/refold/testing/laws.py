"""The laws that every transformation must keep, each a function of a transformation and an example.

A law raises `LawBroken`, whose sentence says what came out instead. `check_laws` runs all of them: call it in the tests
of a transformation of your own.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import refold
from refold import history, undo
from refold.errors import WeightsChanged
from refold.examples import Example, layers
from refold.graph.values import example_value
from refold.record.outcome import result
from refold.rewrite.composition import LintAndRecompile, compose
from refold.rewrite.preview import explain
from refold.rewrite.rule import Rewrite
from refold.rewrite.transformation import Transformation, check_transformation
from refold.testing.equivalence import ValuesOfNodes, as_copies, as_dtype, as_float64, deviations, run
from refold.testing.faults import check_faults
from refold.testing.portrait import Portrait
from refold.testing.processes import reverse, reverse_in_new_process
from refold.transformations.change_true_div_to_mul_by_inverse import ChangeTrueDivToMulByInverse

Law = Callable[[Transformation, nn.Module, tuple[Any, ...]], None]


class LawBroken(AssertionError):
    """A transformation does not keep a law."""


def check_laws(
    transformation: Transformation, examples: Iterable[Example] | None = None, laws: Iterable[Law] | None = None
) -> None:
    """Raise `LawBroken` if a transformation breaks a law on one of the examples: (model, inputs) pairs that it fires
    on. A `Rewrite` brings its own."""
    check_transformation(transformation)
    if examples is None and isinstance(transformation, Rewrite):
        examples = transformation.examples()
    given = list(examples or ())
    if not given:
        raise LawBroken(f"{transformation!r} has no examples, so nothing shows that it ever fires (L15).")
    for law in LAWS.values() if laws is None else laws:
        for index, (model, inputs) in enumerate(given):
            check_law(law, transformation, model, inputs, f"example {index}")
    if laws is None:
        check_new_process([(transformation, model, inputs) for model, inputs in given])


def check_law(law: Law, t: Transformation, model: nn.Module, inputs: tuple[Any, ...], where: str = "") -> None:
    """Run one law on copies of a model and its inputs."""
    try:
        law(t, copy.deepcopy(model), as_copies(inputs))
    except LawBroken as broken:
        raise LawBroken(f"{t!r} breaks {law.__name__} on {where or type(model).__name__}: {broken}") from None
    except Exception as error:
        raised = f"it raised {type(error).__name__}: {error}"
        raise LawBroken(f"{t!r} breaks {law.__name__} on {where or type(model).__name__}: {raised}") from error


def graph_of(model: nn.Module) -> GraphModule:
    """The graph of an example: itself if it is captured already, else its symbolic trace."""
    return model if isinstance(model, GraphModule) else symbolic_trace(model)


def _require(condition: object, sentence: str) -> None:
    if not condition:
        raise LawBroken(sentence)


def _require_same(before: Portrait, gm: nn.Module, what: str, *, same_objects: bool = True) -> None:
    found = before.differences(Portrait.of(gm), same_objects=same_objects)
    _require(not found, f"{what}: {'; '.join(found)}")


# --- the laws ----------------------------------------------------------------------------------------------------


def l1_no_match_changes_nothing(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Where nothing matches, nothing changes, no history is begun, and the reason is recorded."""
    gm = graph_of(layers.nothing()[0])
    before = Portrait.of(gm)
    t(gm)
    _require_same(before, gm, "it changed a model that computes nothing")
    _require(not history(gm), "it began a history without a change")
    outcome = result(gm)
    _require(not outcome.rewritten, "it says that it rewrote something in a model that computes nothing")
    _require(outcome.refused or outcome.note, "it found nothing and does not say so")


def l2_applied_is_equivalent(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """What preserves computation computes the same by the float64 criterion, and no worse in the example's dtype."""
    if not t.preserves_computation:
        return
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        gm, typed_inputs = as_dtype(graph_of(model), dtype), as_dtype(inputs, dtype)
        for deviation in deviations(gm, t(copy.deepcopy(gm)), typed_inputs, dtype):
            raise LawBroken(f"in {str(dtype).removeprefix('torch.')}, {deviation}")


def l3_reverse_is_exact(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Reversing gives back code, names, order, values and the very same tensor objects; so does `undo`."""
    for reverse_or_undo in (reverse, lambda t, gm: undo(gm, None)):
        gm = graph_of(copy.deepcopy(model))
        before, expected = Portrait.of(gm), run(gm, inputs)
        held = [*gm.parameters(), *gm.buffers()]  # what lives must come back as the same object
        back = reverse_or_undo(t, t(gm))
        _require_same(before, back, "the reverse is not exact")
        _require(not history(back), "a history is left after everything was reversed")
        found = run(back, inputs)
        _require(all(map(torch.equal, expected, found)), f"the model computes other bits, {len(held)} tensors alive")


def l4_reverse_after_deepcopy(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A deep copy can be reversed as well, also a copy of a copy."""
    gm = graph_of(model)
    before = Portrait.of(gm)
    t(gm)
    clone = copy.deepcopy(copy.deepcopy(gm))
    _require_same(before, reverse(t, clone), "the reverse of a deep copy is not exact", same_objects=False)


def l5_reverse_after_pickle(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """So can what comes out of pickle, of `torch.save`, and a deep copy of that."""
    gm = graph_of(model)
    if not can_be_pickled(gm):
        return  # torch cannot pickle this graph, rewritten or not
    before = Portrait.of(gm)
    t(gm)
    pickled = pickle.loads(pickle.dumps(gm))
    _require_same(before, reverse(t, copy.deepcopy(pickled)), "after pickle and deepcopy", same_objects=False)
    _require_same(before, reverse(t, pickled), "after pickle", same_objects=False)
    memory = io.BytesIO()
    torch.save(gm, memory)
    memory.seek(0)
    loaded = torch.load(memory, weights_only=False)
    _require_same(before, reverse(t, loaded), "after torch.save", same_objects=False)


def can_be_pickled(gm: GraphModule) -> bool:
    """Whether torch itself can pickle a graph and load it again (it cannot for most exported ones)."""
    try:
        pickle.loads(pickle.dumps(gm))
    except Exception:
        return False
    return True


def l7_twice_changes_nothing_more(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Applying again changes nothing more."""
    gm = t(graph_of(model))
    once, length = Portrait.of(gm), len(history(gm))
    _require_same(once, t(gm), "applying it a second time changed something")
    _require(len(history(gm)) == length, "applying it a second time recorded a change")


def l8_compose_is_step_by_step(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """`compose` equals doing it step by step, both ways."""
    other = ChangeTrueDivToMulByInverse()
    stepwise, together = graph_of(copy.deepcopy(model)), graph_of(copy.deepcopy(model))
    before = Portrait.of(together)
    other(t(stepwise))
    both = compose(t, compose(other, LintAndRecompile()))
    both(together)
    _require_same(Portrait.of(stepwise), together, "compose differs from step by step", same_objects=False)
    _require_same(before, reverse(both, together), "reversing the composition is not exact")
    apart = compose(t, other, inplace=False)(together)
    _require_same(before, together, "compose(inplace=False) touched its argument")
    _require_same(before, undo(apart, None), "undoing compose(inplace=False) is not exact", same_objects=False)


def l9_fresh_instance_reverses(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """An equal instance, made elsewhere, has the same signature and can reverse."""
    fresh = copy.deepcopy(t)
    _require(fresh.signature == t.signature == t.signature, "an equal instance has another signature")
    gm = graph_of(model)
    before = Portrait.of(gm)
    _require_same(before, reverse(fresh, t(gm)), "the reverse by a fresh instance is not exact")


def l10_faults_leave_no_trace(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A fault in any line, of the way there or back, leaves the module as it was."""
    for sentence in check_faults(t, graph_of(model), most=12):
        raise LawBroken(sentence)


def l11_clones_are_independent(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A clone and its original share no record and no memory."""
    gm = graph_of(model)
    before = Portrait.of(gm)
    t(gm)
    clone = copy.deepcopy(gm)
    rewritten = Portrait.of(clone)
    shared = {id(c) for c in history(gm)} & {id(c) for c in history(clone)}
    _require(not shared, "a clone shares a record with its original")
    with torch.no_grad():
        for parameter in gm.parameters():
            parameter.data = parameter.data + 1
    _require_same(rewritten, clone, "writing into the original changed its clone")
    _require_same(before, reverse(t, clone), "a clone cannot be reversed on its own", same_objects=False)
    _require(history(gm), "reversing the clone took the history of the original")


def l12_original_checkpoint_loads(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A checkpoint of the original loads before the rewrite, while it is in place, and after it is undone."""
    precise, gm = graph_of(as_float64(model)), graph_of(model)
    checkpoint = {k: v.detach().clone() for k, v in _moved(copy.deepcopy(gm)).state_dict().items()}
    reference = copy.deepcopy(gm)
    reference.load_state_dict(checkpoint)
    expected = Portrait.of(reference).tensors

    before = copy.deepcopy(gm)
    before.load_state_dict(checkpoint)
    _require(Portrait.of(undo(t(before), None)).tensors == expected, "a checkpoint loaded before is not given back")
    t(gm)
    _load_while_folded(gm, checkpoint)
    given = refold.original_state_dict(gm)
    _require(list(given) == list(checkpoint), "the folded model gives a checkpoint with other names")
    wrong = [k for k, v in given.items() if not torch.equal(v, checkpoint[k])]
    _require(not wrong, f"loaded while folded, {', '.join(wrong)} come out with other bits")
    undo(gm, None)
    _require(Portrait.of(gm).tensors == expected, "a checkpoint loaded while folded is not given back by undo")
    gm.load_state_dict(checkpoint)
    _require_computes_with_what_it_loads(t, as_float64(reference), precise, as_float64(inputs))


def _load_while_folded(gm: GraphModule, checkpoint: dict[str, torch.Tensor]) -> None:
    try:
        refold.load_original_state_dict(gm, checkpoint)
    except refold.RefoldError as refusal:
        raise LawBroken(f"it refuses an original checkpoint: {refusal}") from refusal


def _require_computes_with_what_it_loads(
    t: Transformation, reference: GraphModule, gm: GraphModule, inputs: tuple[Any, ...]
) -> None:
    """A checkpoint loaded while folded is what the folded model computes with from then on."""
    t(gm)
    _load_while_folded(gm, reference.state_dict())
    if t.preserves_computation:
        for deviation in deviations(reference, gm, inputs):
            raise LawBroken(f"loaded while folded, the checkpoint is not what the model computes with: {deviation}")


def l13_training_is_carried_back(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Weights changed while folded come back through the inverse, so that the restored model computes what the folded
    one did; or the reverse refuses, touches nothing, and says what to do."""
    gm = as_float64(graph_of(model))
    precise = as_float64(inputs)
    t(gm)
    _moved(gm)
    trained, folded = Portrait.of(gm), copy.deepcopy(gm)
    try:
        undo(gm, None)
    except WeightsChanged as refusal:
        _require_same(trained, gm, "a refused reverse touched the module")
        _require("weights='original'" in str(refusal), "a refused reverse does not name a way out")
        return
    for deviation in deviations(gm, folded, precise):
        raise LawBroken(f"what was trained while folded is lost or distorted: {deviation}")


@torch.no_grad()
def _moved(gm: GraphModule) -> GraphModule:
    """As after a training step: every trainable number is another one."""
    generator = torch.Generator().manual_seed(1)
    for parameter in gm.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            step = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 0.1 + 0.05
            parameter.add_(step.to(parameter.dtype))
    return gm


def l14_eager_model_is_untouched(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """The model that was traced keeps its modules, its tensors and what it computes."""
    if isinstance(model, GraphModule):
        return
    before, expected = Portrait.of(model), run(model, inputs)
    gm = t(symbolic_trace(model))
    _require_same(before, model, "the eager model was changed")
    _require(all(map(torch.equal, expected, run(model, inputs))), "the eager model computes other bits")
    undo(gm, None)
    _require_same(before, model, "the eager model was changed by the reverse")


def l15_fires_on_its_examples(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """The rewrite really happened: the graph or a tensor differs, it is recorded, reported, and was foretold."""
    gm = graph_of(model)
    before = Portrait.of(gm)
    foretold = explain(gm, t)
    _require_same(before, gm, "explaining it touched the module")
    t(gm)
    _require(before.differences(Portrait.of(gm)), "it changed nothing on its own example")
    _require(history(gm), "it changed something and recorded nothing")
    _require(result(gm).rewritten, "it changed something and reports nothing")
    _require(foretold.rewritten, "explain did not foresee what it rewrote")
    run(gm, inputs)


def l16_made_nodes_carry_what_capture_recorded(t: Transformation, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """On a captured model, what the rewrite makes has a recorded value of the right shape and dtype, and stems from the
    places of the model that it replaces."""
    gm = _captured(model, inputs)
    if gm is None:
        return
    before = {node.name: (node.op, node.target) for node in gm.graph.nodes}
    metas = {node.name: dict(node.meta) for node in gm.graph.nodes}
    t(gm)
    found = ValuesOfNodes(gm)
    run(found.run, inputs)
    replaced = [metas[name] for site in result(gm).rewritten for name in site.nodes if name in metas]
    for node, value in found.tensors.items():
        if before.get(node.name) == (node.op, node.target):
            continue
        recorded = example_value(node)
        _require(recorded is not None, f"{node.name}, which it made, has no recorded value")
        fits = recorded is not None and recorded.dtype == value.dtype and _fits(recorded.shape, value.shape)
        _require(fits, f"{node.name} gives {value.dtype}{list(value.shape)}, and its recorded value is {recorded}")
        neighbours = [metas.get(other.name, {}) for other in (*node.users, *node.all_input_nodes)]
        for key in ("nn_module_stack", "stack_trace") if node.op != "get_attr" else ():
            known = [meta[key] for meta in (*replaced, *neighbours) if key in meta]
            _require(not known or node.meta.get(key) in known, f"{node.name} has no {key} of what it replaces")


def _captured(model: nn.Module, inputs: tuple[Any, ...]) -> GraphModule | None:
    """A graph with recorded values: that of the example, or its capture; None if it has none."""
    try:
        gm = model if isinstance(model, GraphModule) else refold.trace(model, *inputs, dynamic=False)
    except refold.CaptureError:
        return None
    return gm if any(example_value(node) is not None for node in gm.graph.nodes) else None


def _fits(recorded: Iterable[Any], sizes: Iterable[int]) -> bool:
    """Whether recorded sizes are these; an open one may be any."""
    expected, found = list(recorded), list(sizes)
    return len(expected) == len(found) and all(
        not isinstance(a, int) or a == b for a, b in zip(expected, found, strict=True)
    )


# --- in another process ------------------------------------------------------------------------------------------


def check_new_process(cases: Iterable[tuple[Transformation, nn.Module, tuple[Any, ...]]]) -> None:
    """L6: saved here, loaded and reversed in a new process under another hash seed, everything is as it was. All cases
    share one process."""
    rewritten, befores = [], []
    for t, model, _inputs in cases:
        gm = graph_of(copy.deepcopy(model))
        if can_be_pickled(gm):
            befores.append(Portrait.of(gm))
            rewritten.append((t, t(gm)))
    for (t, _gm), before, found in zip(rewritten, befores, reverse_in_new_process(rewritten), strict=True):
        expected = before.plain()
        wrong = [part for part in expected if expected[part] != found.get(part)]
        if wrong:
            differences = "; ".join(f"{part} was {expected[part]} and is {found.get(part)}" for part in wrong)
            raise LawBroken(f"{t!r} breaks L6, reversed in a new process: {differences}")


LAWS: dict[str, Law] = {
    name.partition("_")[0].upper(): law for name, law in list(globals().items()) if re.match(r"l\d+_", name)
}
