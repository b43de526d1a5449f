"""FoldConstants evaluates what is the same in every run, and nothing that training, checkpoints or chance change."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import refold
from refold.capture.tracing import trace
from refold.errors import CheckpointMismatch, WeightsChanged
from refold.graph.targets import name_of
from refold.record.copies import meta_copy
from refold.rewrite.rule import Site
from refold.testing.laws import LAWS, LawBroken, check_law, l12_original_checkpoint_loads
from refold.transformations.fold_constants import FoldConstants


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("kept", torch.arange(4.0))
        self.register_buffer("extra", torch.arange(4.0) + 1, persistent=False)

    def forward(self, x):
        return self.function(self, x)


X = torch.randn(3, 4)


def folded(function, **settings):
    gm = trace(Of(function), X, dynamic=False)
    original = copy.deepcopy(gm)
    FoldConstants(**settings)(gm)
    assert torch.equal(gm(X), original(X))
    return gm


def names(gm):
    return [name_of(n) for n in gm.graph.nodes if n.op.startswith("call")]


def test_a_table_is_computed_once_and_moves_with_the_module():
    gm = folded(lambda m, x: x * torch.outer(torch.arange(3), torch.full((4,), 0.5)).cos())
    assert names(gm) == ["mul"]
    assert [name for name, _ in gm.named_buffers()] == ["constants.cos"]
    assert gm.state_dict().keys() == trace(Of(lambda m, x: x * 2), X).state_dict().keys()
    assert next(copy.deepcopy(gm).to("meta").buffers()).is_meta


def test_only_buffers_outside_the_checkpoint_are_constant():
    assert names(folded(lambda m, x: x + m.extra.sin())) == ["add"]
    assert names(folded(lambda m, x: x + m.kept.sin())) == ["sin", "add"]
    assert names(folded(lambda m, x: x + m.scale.sin())) == ["sin", "add"]


def test_parameters_on_request():
    gm = folded(lambda m, x: x + m.scale.sin() * m.kept, parameters=True)
    assert names(gm) == ["add"]
    refold.undo(gm)
    assert names(gm) == ["sin", "mul", "add"] and gm.scale.requires_grad


@pytest.mark.parametrize("taken", ["constants", "constants_2"])
def test_names_that_modules_have_already(taken):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("constants", torch.randn(4))
            self.register_parameter(taken, nn.Parameter(torch.randn(4))) if taken != "constants" else None

        def forward(self, x):
            return (
                x * self.constants * getattr(self, taken) + torch.arange(4).to(torch.float32) - torch.arange(4).half()
            )

    gm = trace(Named(), X, dynamic=False)
    original = copy.deepcopy(gm)
    FoldConstants()(gm)
    assert torch.equal(gm(X), original(X)) and names(gm).count("arange") == 0
    refold.undo(gm)
    assert gm.code == original.code


def test_a_buffer_that_lies_in_memory_which_is_written():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.ones(4), persistent=False)
            self.register_buffer("part", self.count[:2], persistent=False)
            self.register_buffer("other", torch.ones(2), persistent=False)

        def forward(self, x):
            self.count.add_(1.0)
            return x[0, :2] + self.part.sin() + self.other.sin()

    gm = trace(Views(), X, dynamic=False)
    original = copy.deepcopy(gm)
    FoldConstants()(gm)
    assert names(gm).count("sin") == 1
    for _ in range(2):
        assert torch.equal(gm(X), original(X))


def test_a_module_of_unknown_code_may_write_its_own_buffer():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(4), persistent=False)

        def forward(self, x):
            self.n.add_(1)
            return x

    graph = torch.fx.Graph()
    counted = graph.call_module("counter", (graph.placeholder("x"),))
    doubled = graph.call_function(torch.mul, (graph.get_attr("counter.n"), 2.0))
    graph.output(graph.call_function(torch.add, (counted, doubled)))
    root = nn.Module()
    root.counter = Counter()
    gm = torch.fx.GraphModule(root, graph)
    original = copy.deepcopy(gm)
    FoldConstants()(gm)
    assert torch.equal(gm(X), original(X)) and not refold.history(gm)


def test_the_order_of_axes_in_memory_is_kept():
    def viewed(m, x):
        table = torch.arange(12.0).view(3, 4).t()
        return (table.sin() + x.t()).t().view(12)

    assert "sin" not in names(folded(viewed))

    def repeated(m, x):
        rows = torch.arange(4.0).expand(3, 4).unsqueeze(0)
        return (rows + x.t().contiguous().t()).transpose(1, 2).view(12)

    gm = folded(repeated)
    assert "repeats values in memory" in refold.result(gm).refused[0].reason


def test_an_embedding_that_renormalises_its_table_is_not_evaluated():
    class Renormalising(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 4) * 5)

        def forward(self, x):
            return x + F.embedding(torch.tensor([0, 1, 2]), self.table, max_norm=1.0)

    model = Renormalising()
    before = model.table.detach().clone()
    gm = torch.fx.symbolic_trace(model)
    FoldConstants(parameters=True)(gm)
    assert torch.equal(model.table, before)
    assert torch.equal(gm(X), copy.deepcopy(model)(X))


def test_autocast_is_not_left_out():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    entered = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
    product = graph.call_function(torch.mm, (graph.call_function(torch.full, ((3, 3), 0.1)),) * 2)
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (entered,))
    after = graph.call_function(torch.sin, (graph.call_function(torch.full, ((3, 1), 0.1)),))
    total = graph.call_function(torch.add, (graph.call_function(torch.mm, (product.args[0], x)), after))
    graph.output(graph.call_function(torch.add, (total, graph.call_method("sum", (product,)))))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    original = copy.deepcopy(gm)
    FoldConstants()(gm)
    assert torch.equal(gm(X), original(X)) and "sin" not in names(gm) and names(gm).count("mm") == 2


def test_chance_is_not_folded():
    gm = trace(Of(lambda m, x: x + torch.rand(4).sin()), X, dynamic=False)
    FoldConstants()(gm)
    assert names(gm)[-3:] == ["rand", "sin", "add"] and not refold.history(gm)


def test_what_leaves_or_is_written_into_is_not_folded():
    gm = trace(Of(lambda m, x: (x + 1, m.extra.sin()[:2])), X, dynamic=False)
    FoldConstants()(gm)
    assert "leaves the graph" in refold.result(gm).refused[0].reason

    def written(m, x):
        table = m.extra.sin()
        table.add_(x[0])
        return table + x

    gm = trace(Of(written), X, dynamic=False)
    FoldConstants()(gm)
    assert torch.equal(gm(X), gm(X)) and "sin" in names(gm)


def test_the_limit_and_free_expansion():
    assert "sin" in names(folded(lambda m, x: x + m.extra.sin(), limit=15))
    gm = folded(lambda m, x: x + m.extra.sin().expand(3, 4), limit=16)
    assert names(gm) == ["expand", "add"]


def test_equal_constants_are_kept_once():
    gm = trace(Of(lambda m, x: (x + torch.arange(4).cos()) * torch.arange(4).cos()), X, dynamic=False)
    refold.EliminateCommonSubexpressions()(gm)
    FoldConstants()(gm)
    assert [name for name, _ in gm.named_buffers()] == ["constants.cos"]
    assert len(refold.result(gm).rewritten) == 1


def test_a_module_without_values_is_folded_at_the_same_places():
    gm = trace(Of(lambda m, x: x + m.extra.sin()), X, dynamic=False)
    paper = meta_copy(gm)
    FoldConstants()(gm)
    FoldConstants()(paper)
    assert paper.code == gm.code and all(buffer.is_meta for buffer in paper.buffers())


def test_open_sizes_are_no_constants():
    gm = trace(Of(lambda m, x: x + torch.arange(x.shape[0])[:, None]), X)
    FoldConstants()(gm)
    assert "arange" in names(gm)
    assert gm(torch.zeros(5, 4))[4, 0] == 4


def test_the_reverse_is_exact():
    gm = trace(Of(lambda m, x: x + m.extra.sin()), X, dynamic=False)
    code, buffers = gm.code, dict(gm.named_buffers())
    FoldConstants()(gm, reverse=False)
    assert gm.code != code
    FoldConstants()(gm, reverse=True)
    assert gm.code == code
    assert all(dict(gm.named_buffers())[k] is v for k, v in buffers.items()) and len(buffers) == 1


# --- checkpoints ---------------------------------------------------------------------------------------------------


def another_checkpoint(gm):
    return {name: tensor + torch.linspace(0.5, 1, tensor.numel()) for name, tensor in gm.state_dict().items()}


def rewritten_and_expected(function, **settings):
    """A folded module, a checkpoint, and the module that never was folded with that checkpoint."""
    plain = trace(Of(function), X, dynamic=False)
    gm, checkpoint = copy.deepcopy(plain), another_checkpoint(plain)
    FoldConstants(**settings)(gm)
    assert "sin" not in names(gm)
    plain.load_state_dict(checkpoint)
    return gm, checkpoint, plain


def assert_loads(gm, checkpoint, plain):
    addresses = {name: tensor.data_ptr() for name, tensor in (*gm.named_parameters(), *gm.named_buffers())}
    refold.load_original_state_dict(gm, checkpoint)
    assert torch.equal(gm(X), plain(X))
    assert addresses == {name: t.data_ptr() for name, t in (*gm.named_parameters(), *gm.named_buffers())}
    given = refold.original_state_dict(gm)
    assert list(given) == list(checkpoint) and all(torch.equal(given[k], v) for k, v in checkpoint.items())
    refold.undo(gm, None)
    assert gm.code == plain.code and torch.equal(gm(X), plain(X))
    assert all(torch.equal(gm.state_dict()[k], v) for k, v in checkpoint.items())


def test_a_constant_without_weights_states_its_map_and_the_original_checkpoint_loads():
    gm, checkpoint, plain = rewritten_and_expected(lambda m, x: x * m.scale + m.extra.sin() + m.kept)
    (record,) = refold.history(gm)[0].maps
    assert str(record.map) == "constant=constants.sin = Constant()()" and not refold.history(gm)[0].fingerprints
    assert refold.history(gm).nbytes == 0
    constant = gm.constants.sin.clone()
    assert_loads(gm, checkpoint, plain)
    assert torch.equal(constant, (torch.arange(4.0) + 1).sin())


def test_what_depends_on_weights_is_computed_again_from_the_checkpoint():
    assert_loads(
        *rewritten_and_expected(lambda m, x: x * m.scale.sin() + m.kept.sin() + m.extra.sin(), parameters=True)
    )
    gm, _, _ = rewritten_and_expected(lambda m, x: x * m.scale.sin() + m.extra.sin(), parameters=True)
    assert [len(gm.constants._buffers), len(refold.history(gm)[0].maps), len(refold.history(gm)[0].fingerprints)] == [
        2,
        1,
        1,
    ]


def test_a_wrong_checkpoint_is_refused_whole_where_it_is_computed_again():
    gm, checkpoint, _ = rewritten_and_expected(lambda m, x: x * m.scale.sin() + m.kept, parameters=True)
    before = {name: tensor.clone() for name, tensor in (*gm.named_parameters(), *gm.named_buffers())}
    for wrong in ({"scale": checkpoint["scale"]}, checkpoint | {"more": X}, checkpoint | {"scale": X}):
        with pytest.raises(CheckpointMismatch, match=r"kept|more|size mismatch"):
            refold.load_original_state_dict(gm, wrong)
    now = dict((*gm.named_parameters(), *gm.named_buffers()))
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
    outcome = refold.load_original_state_dict(gm, {"scale": checkpoint["scale"]}, strict=False)
    assert outcome.missing_keys == ["kept"] and torch.equal(gm.constants.sin, checkpoint["scale"].sin())


def test_a_constant_that_was_written_into_is_not_dropped_silently():
    gm, _, _ = rewritten_and_expected(lambda m, x: x * m.scale + m.extra.sin())
    gm.constants.sin.data.mul_(2)
    for give_back in (refold.undo, refold.original_state_dict):
        with pytest.raises(WeightsChanged, match=r"constants\.sin cannot be carried back"):
            give_back(gm)
    refold.undo(gm, weights="original")
    assert "sin" in names(gm)


@pytest.mark.parametrize("casts", [(torch.float16,), (torch.bfloat16, torch.float32), (torch.float64,)])
def test_a_cast_is_no_change_of_a_constant(casts):
    gm, _, plain = rewritten_and_expected(lambda m, x: x * m.scale + m.extra.sin())
    for dtype in casts:
        gm.to(dtype)
    assert gm.constants.sin.dtype == casts[-1] and list(refold.original_state_dict(gm)) == ["scale"]
    refold.undo(gm)
    assert gm.code == plain.code


def test_the_law_catches_a_constant_that_is_said_to_need_no_weight():
    class Careless(FoldConstants):
        def find(self, view):
            for item in super().find(view):
                yield replace(item, detail=(item.detail[0], ())) if isinstance(item, Site) else item

    example = trace(Of(lambda m, x: x * m.scale.sin()), X, dynamic=False), (X,)
    check_law(l12_original_checkpoint_loads, FoldConstants(parameters=True), *example)
    with pytest.raises(LawBroken, match="is not what the model computes with"):
        check_law(l12_original_checkpoint_loads, Careless(parameters=True), *example)


# --- computed from weights ---------------------------------------------------------------------------------------


class Relative(nn.Module):
    """Attention with relative keys, projected anew in every call, by a layer that also projects the inputs."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.key, self.query = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        relative = self.key(self.norm(self.table.weight)).view(5, 2, 2).permute(1, 2, 0)
        rows = self.query(x).view(-1, 2, 2).transpose(0, 1)
        return rows @ relative + self.key(x).sum()


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("dynamic", [False, "auto"])
def test_what_is_computed_from_weights_keeps_every_law(law, dynamic):
    torch.manual_seed(0)
    model = trace(Relative(), X, dynamic=dynamic)
    check_law(LAWS[law], FoldConstants(parameters=True), model, (X,))


def test_a_projection_of_a_table_is_done_once_and_training_elsewhere_is_not_lost():
    torch.manual_seed(0)
    gm = trace(Relative(), X)
    names_before, code = list(gm.state_dict()), gm.code
    FoldConstants(parameters=True)(gm)
    called = [node.target for node in gm.graph.nodes if node.op == "call_module"]
    assert sorted(called) == ["key", "query"] and list(gm.state_dict()) == names_before
    trained = gm.key.weight.detach() + 1
    gm.key.weight.data = trained
    for give_back in (refold.undo, refold.original_state_dict):
        with pytest.raises(WeightsChanged, match=r"key\.weight was changed after .* weights='original'"):
            give_back(gm)
    refold.undo(gm, weights="original")
    assert gm.code == code and torch.equal(gm.key.weight, trained)


def test_a_view_of_a_weight_stays_one():
    gm = folded(lambda m, x: x @ m.scale.expand(3, 4).t() + (m.scale * 2).view(1, 4).sum(), parameters=True)
    assert names(gm)[:2] == ["expand", "t"] and len(gm.constants._buffers) == 1


def test_what_is_much_larger_than_its_weights_is_made_in_every_run():
    gm = folded(lambda m, x: x.sum() + m.scale.sin().repeat(300_000, 1), parameters=True)
    assert names(gm) == ["sum", "repeat", "add"] and gm.constants.sin.shape == (4,)
    gm = folded(lambda m, x: x.sum() + m.scale.sin().repeat(3, 1), parameters=True)
    assert names(gm) == ["sum", "add"]


def test_relative_projections_of_deberta_are_done_once():
    transformers = pytest.importorskip("transformers")
    config = transformers.DebertaV2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=20,
        relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8, share_att_key=True,
    )  # fmt: skip
    model, ids = transformers.DebertaV2Model(config).eval(), torch.randint(3, 20, (2, 6))
    gm = trace(model, ids)
    FoldConstants(parameters=True)(gm)
    called = [str(node.target).rpartition(".")[2] for node in gm.graph.nodes if node.op == "call_module"]
    assert called.count("key_proj") == called.count("query_proj") == 2, "four of eight were calls on the table"
    for given in (ids, ids.repeat(2, 2)):
        assert torch.equal(gm(given)["last_hidden_state"], model(given).last_hidden_state)
