"""SimplifyAttentionMask fires on what is proven for all sizes, and on nothing else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import refold
from refold.patterns.masks.formulas import Affine, Assumption, AtLeastZero, affine, conjoin, disjoin, negate, recognise
from refold.transformations.simplify_attention_mask import SimplifyAttentionMask

INF = float("inf")
MIN = torch.finfo(torch.float32).min


def places(n):
    return torch.arange(n)[:, None], torch.arange(n)[None, :]


def with_first_row_open(n):
    q, k = places(n)
    return (k <= q) | (q < 1)


def packed(n):
    """The way transformers looks for packed sequences in positions that are not packed."""
    position = torch.arange(n)[None] + 0
    group = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    rows, (q, k) = torch.arange(1)[:, None, None], places(n)
    return (k <= q) & (group[rows, q[None]] == group[rows, k[None]])


def _tril(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


def _chosen(n, value):
    return torch.where(_tril(n), *(torch.full((n, n), v, dtype=torch.float64) for v in (value, value)))


CASES = {
    "full": (lambda n: torch.ones(n, n, dtype=torch.bool), "dropped"),
    "full by comparison": (lambda n: (torch.arange(n) + 3 >= 3)[None].expand(n, n), "dropped"),
    "zeros": (lambda n: torch.zeros(n, n), "dropped"),
    "one minus one, scaled": (lambda n: (1.0 - torch.ones(n, n)) * MIN, "dropped"),
    "not ahead or not": (lambda n: (places(n)[0] >= places(n)[1]) | (places(n)[1] > places(n)[0]), "dropped"),
    "causal": (lambda n: places(n)[1] <= places(n)[0], "causal"),
    "tril": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(), "causal"),
    "not triu": (lambda n: ~torch.ones(n, n, dtype=torch.bool).triu(1), "causal"),
    "additive": (lambda n: torch.zeros(n, n).masked_fill(places(n)[1] > places(n)[0], -INF), "causal"),
    "additive, smallest": (lambda n: torch.full((n, n), MIN).triu(1), "causal"),
    "additive by where": (lambda n: torch.where(places(n)[1] <= places(n)[0], 0.0, -INF), "causal"),
    "twice transposed": (lambda n: (places(n)[1] <= places(n)[0]).t().t(), "causal"),
    "shifted alike": (lambda n: places(n)[1] + 7 <= places(n)[0] + 7, "causal"),
    "packed": (packed, "causal"),
    "compared in float32": (lambda n: _tril(n) | ~(torch.full((n, n), 0.1) == 0.1), "causal"),
    "compared in float64": (lambda n: _chosen(n, 0.1) != 0.1, "kept"),
    "wrapped around": (lambda n: torch.full((n, n), 200, dtype=torch.uint8) + 100 > 100, "kept"),
    "strictly causal": (lambda n: places(n)[1] < places(n)[0], "kept"),
    "one ahead": (lambda n: places(n)[1] <= places(n)[0] + 1, "kept"),
    "anti-causal": (lambda n: places(n)[1] >= places(n)[0], "kept"),
    "transposed": (lambda n: (places(n)[1] <= places(n)[0]).t(), "kept"),
    "a window": (lambda n: (places(n)[1] <= places(n)[0]) & (places(n)[1] > places(n)[0] - 2), "kept"),
    "an open row": (with_first_row_open, "kept"),
    "only the past counts less": (lambda n: torch.where(places(n)[1] <= places(n)[0], 0.0, -1e4), "kept"),
    "nothing is seen": (lambda n: torch.zeros(n, n, dtype=torch.bool), "kept"),
    "ones are added": (lambda n: torch.ones(n, n), "kept"),
    "first column hidden": (lambda n: (torch.arange(n) >= 1)[None].expand(n, n), "kept"),
    "slopes": (lambda n: (places(n)[1] - places(n)[0]).to(torch.float32), "kept"),
}


class Masked(nn.Module):
    def __init__(self, mask, in_batch=True):
        super().__init__()
        self.mask, self.in_batch = mask, in_batch

    def forward(self, x):
        mask = self.mask(x.shape[-2])
        mask = mask.expand(x.shape[0], 1, x.shape[-2], x.shape[-2]) if self.in_batch else mask
        return F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=mask)


def capture(model, *inputs, dynamic=True):
    open_sizes = [dict.fromkeys(range(t.dim() - 1), torch.export.Dim.AUTO) for t in inputs] if dynamic else None
    return torch.export.export(model, inputs, strict=False, dynamic_shapes=open_sizes and tuple(open_sizes)).module()


def outcome(call):
    if isinstance(call, torch.fx.GraphModule):
        call = next(n for n in call.graph.nodes if "scaled_dot_product" in str(n.target))
    given = call.kwargs
    if call.args[3:] or "attn_mask" in given:
        return "kept"
    return "causal" if given.get("is_causal") else "dropped"


class AllCases(nn.Module):
    """Every case in one graph."""

    def forward(self, x):
        return [Masked(mask)(x) for mask, _ in CASES.values()]


@pytest.mark.parametrize("dynamic", [True, False], ids=["any size", "one size"])
def test_verdicts(dynamic):
    gm = capture(AllCases(), torch.randn(2, 3, 6, 4), dynamic=dynamic)
    original = copy.deepcopy(gm)
    calls = [n for n in gm.graph.nodes if "scaled_dot_product" in str(n.target)]
    SimplifyAttentionMask()(gm)
    assert {name: outcome(n) for name, n in zip(CASES, calls, strict=True)} == {k: v for k, (_, v) in CASES.items()}
    refused = {r.node: r.reason for r in refold.result(gm).refused}
    assert set(refused) == {n.name for n in calls if outcome(n) == "kept"}
    assert all("not proven" in reason for reason in refused.values())
    for batch, length in [(2, 6), (3, 2), (3, 3), (4, 9)] if dynamic else [(2, 6)]:
        x = torch.randn(batch, 3, length, 4)
        for name, found, expected in zip(CASES, gm(x), original(x), strict=True):
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True), name


def test_a_window_that_no_length_reaches_is_causal_for_fixed_sizes():
    def mask(n):
        q, k = places(n)
        return (k <= q) & (k > q - 64)

    assert outcome(SimplifyAttentionMask()(capture(Masked(mask), torch.randn(1, 1, 6, 4), dynamic=False))) == "causal"
    assert outcome(SimplifyAttentionMask()(capture(Masked(mask), torch.randn(2, 2, 6, 4)))) == "kept"


def test_the_dead_computation_goes_and_comes_back():
    gm = capture(Masked(packed), torch.randn(2, 3, 6, 4))
    code, nodes = gm.code, len(gm.graph.nodes)
    SimplifyAttentionMask()(gm)
    assert not any("arange" in str(n.target) for n in gm.graph.nodes)
    assert len(gm.graph.nodes) < nodes - 4
    SimplifyAttentionMask()(gm, reverse=True)
    assert gm.code == code


def refusal(gm):
    SimplifyAttentionMask()(gm)
    assert not refold.history(gm)
    return refold.result(gm).refused[0].reason


def test_a_mask_that_is_an_input_is_left_alone():
    class Given(nn.Module):
        def forward(self, x, keep):
            q, k = places(x.shape[-2])
            return F.scaled_dot_product_attention(x, x, x, attn_mask=(k <= q) & keep.bool()[:, None, None, :])

    gm = capture(Given(), torch.randn(2, 3, 6, 4), torch.ones(2, 6))
    assert refusal(gm).endswith("it depends on the values of the input keep")


def test_a_mask_of_the_checkpoint_is_left_alone_and_a_constant_is_not():
    class Stored(nn.Module):
        def __init__(self, persistent):
            super().__init__()
            self.register_buffer("seen", torch.ones(16, 16, dtype=torch.bool).tril(), persistent=persistent)

        def forward(self, x):
            n = x.shape[-2]
            return F.scaled_dot_product_attention(x, x, x, attn_mask=self.seen[:n, :n])

    assert "which training or a checkpoint can change" in refusal(capture(Stored(True), torch.randn(2, 3, 6, 4)))
    assert outcome(SimplifyAttentionMask()(capture(Stored(False), torch.randn(2, 3, 6, 4)))) == "causal"


def test_a_mask_that_is_written_into_is_left_alone():
    def mask(n):
        whole = torch.ones(n, n, dtype=torch.bool)
        whole[0] = False
        return whole

    assert "in place" in refusal(capture(Masked(mask), torch.randn(2, 3, 6, 4), dynamic=False))


def test_other_lengths_of_keys_are_left_alone_for_causal_masks_only():
    class Cross(nn.Module):
        def __init__(self, causal):
            super().__init__()
            self.causal = causal

        def forward(self, x, y):
            q, k = torch.arange(x.shape[-2])[:, None], torch.arange(y.shape[-2])[None, :]
            return F.scaled_dot_product_attention(x, y, y, attn_mask=(k <= q) if self.causal else (k >= 0) & (q >= 0))

    inputs = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 9, 4)
    assert "not surely of one length" in refusal(capture(Cross(True), *inputs))
    assert outcome(SimplifyAttentionMask()(capture(Cross(False), *inputs))) == "dropped"


def test_dropout_of_weights_is_left_alone():
    class Dropping(nn.Module):
        def forward(self, x):
            mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool)
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.5)

    assert "at random" in refusal(capture(Dropping(), torch.randn(2, 3, 6, 4)))


def test_a_bias_under_a_condition_that_always_holds():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(1, 3, 6, 6))

        def forward(self, x):
            seen = (torch.arange(x.shape[-2]) >= 0)[None, None, :, None].expand(x.shape[0], -1, -1, x.shape[-2])
            mask = torch.where(seen, self.bias, MIN).contiguous()
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.randn(2, 3, 6, 4)
    gm = capture(Biased(), x, dynamic=False)
    expected = gm(x)
    SimplifyAttentionMask()(gm)
    assert refold.history(gm) and not any("where" in n.name for n in gm.graph.nodes)
    assert torch.equal(gm(x), expected)


def classic(build, *shapes):
    """A graph of calls, with what one example of them notes; `build` makes the output from the inputs."""
    graph = torch.fx.Graph()
    graph.output(build(graph, *(graph.placeholder(f"x{i}") for i in range(len(shapes)))))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    FakeTensorProp(gm).propagate(*(torch.randn(shape) for shape in shapes))
    return gm


def attend(graph, x, y, mask):
    return graph.call_function(F.scaled_dot_product_attention, (x, y, y), {"attn_mask": mask})


def truths(graph, value):
    return graph.call_function(torch.full, ((6, 6), value), {"dtype": torch.bool})


def counted(graph, *args, row, **kwargs):
    return graph.call_method("unsqueeze", (graph.call_function(torch.arange, args, kwargs), 1 - row))


def _counted_from_one(graph, x):
    positions = counted(graph, 1, row=True, end=7), counted(graph, 6, row=False)
    return graph.call_function(torch.le, positions)


def _tril_where(graph, x):
    tril = graph.call_method("tril", (truths(graph, True),))
    return graph.call_method("where", (truths(graph, False), truths(graph, True), tril))


def _cast_by_name(graph, x):
    return graph.call_method("type", (graph.call_method("tril", (truths(graph, True),)), "torch.FloatTensor"))


def _turned(graph, x):
    ones = graph.call_function(torch.ones, (), {"size": (6, 6), "dtype": torch.bool})
    return graph.call_method("transpose", (graph.call_method("tril", (ones,)), 0, 1))


def _swapped(graph, x):
    rows = graph.call_method("unsqueeze", (counted(graph, 6, row=False), 1))
    mask = graph.call_function(torch.ge, (rows, graph.call_function(torch.arange, (6,))))
    return graph.call_method("swapaxes", (graph.call_method("expand", (mask, 6, 6, 6)),), {"axis0": 0, "axis1": 2})


def _window(graph, x):
    n = graph.call_method("size", (x, -2))
    row, column = counted(graph, n, row=False), counted(graph, n, row=True)
    near = graph.call_function(torch.gt, (graph.call_function(torch.add, (column, 64)), row))
    return graph.call_function(torch.bitwise_and, (graph.call_function(torch.le, (column, row)), near))


@pytest.mark.parametrize("mask", [_counted_from_one, _tril_where, _cast_by_name, _turned, _swapped, _window])
def test_calls_that_are_easily_misread(mask):
    gm = classic(lambda graph, x: attend(graph, x, x, mask(graph, x)), (1, 6, 6, 4))
    assert outcome(SimplifyAttentionMask()(gm)) == "kept"


def test_what_one_example_notes_is_no_proof_of_equal_lengths():
    def cross(graph, x, y):
        rows, columns = (graph.call_method("size", (z, -2)) for z in (x, y))
        mask = graph.call_function(torch.le, (counted(graph, columns, row=True), counted(graph, rows, row=False)))
        return attend(graph, x, y, mask)

    assert "not surely of one length" in refusal(classic(cross, (1, 2, 6, 4), (1, 2, 6, 4)))


@pytest.mark.parametrize("written", ["chosen", "where", "copy", "none"])
def test_a_bias_that_is_written_before_the_call(written):
    def build(graph, x, bias):
        values = {"chosen": graph.call_function(torch.mul, (bias, 2.0))}
        values["where"] = graph.call_function(torch.where, (truths(graph, True), values["chosen"], -INF))
        values["copy"] = graph.call_method("clone", (values["where"],))
        if written in values:
            graph.call_method("mul_", (values[written], x))
        return attend(graph, x, x, graph.call_method("clone", (values["copy"],)))

    gm = classic(build, (1, 2, 6, 6), (1, 2, 6, 6))
    SimplifyAttentionMask()(gm)
    assert bool(refold.history(gm)) == (written == "none")
    assert written == "none" or "writes into" in refold.result(gm).refused[0].reason


def test_a_bias_that_is_written_between_calls_is_read_twice():
    def build(graph, x, bias):
        bias = graph.call_function(torch.transpose, (graph.call_function(torch.mul, (bias, 2.0)), -1, -2))
        for _ in range(2):
            mask = graph.call_function(torch.where, (truths(graph, True), bias, -INF))
            x = attend(graph, x, x, mask)
            graph.call_method("mul_", (bias, 3.0))
        return x

    gm = classic(build, (1, 2, 6, 6), (1, 2, 6, 6))
    inputs = torch.randn(1, 2, 6, 6), torch.randn(1, 2, 6, 6)
    expected = copy.deepcopy(gm)(*inputs)
    SimplifyAttentionMask()(gm)
    assert len(refold.result(gm).rewritten) == 2
    assert torch.allclose(gm(*inputs), expected, rtol=1e-5, atol=1e-6)


RELATIONS = {"any": lambda i, j: True, "seen": lambda i, j: j <= i, "ahead": lambda i, j: j > i}


def test_formulas_are_decided_soundly():
    """Whatever is decided for all indices is true at every index of a small box."""
    generator = torch.Generator().manual_seed(0)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    def atom():
        return AtLeastZero(affine(draw(-3, 4), {-2: draw(-2, 3) or 1, -1: draw(-2, 3)}))

    def holds(formula, i, j):
        fixed = Assumption({}).decide  # a formula without indices decides itself
        from refold.patterns.masks.formulas import substitute

        def put(e):
            return Affine(e.constant + sum(s * {-2: i, -1: j}[a] for a, s in e.slopes))

        return fixed(substitute(formula, put))

    decided = 0
    for _ in range(400):
        a, b = atom(), atom()
        formula = (conjoin(a, negate(b)), disjoin(a, b), negate(a))[draw(0, 3)]
        for relation, fits in (
            ("any", lambda i, j: True),
            ("seen", lambda i, j: j <= i),
            ("ahead", lambda i, j: j > i),
        ):
            for sizes in ({}, {-2: 5, -1: 5}):
                verdict = Assumption(sizes, relation).decide(formula)
                found = {holds(formula, i, j) for i in range(5) for j in range(5) if fits(i, j)}
                decided += verdict is not None
                assert verdict is None or found == {verdict}
    assert decided > 100


@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4), (3, 5), (1, 1, 4, 4)])
def test_constants_are_recognised_element_by_element(shape):
    lower = torch.ones(shape[-2:], dtype=torch.bool).tril().expand(shape).clone()
    assert recognise(lower) == AtLeastZero(affine(0, {-2: 1, -1: -1}))
    lower[..., -1, 0] = False
    assert "no pattern" in recognise(lower).reason
    assert recognise(torch.arange(5)[None].expand(3, 5)) == affine(0, {-1: 1})
    assert "no pattern" in recognise(torch.tensor([5, 4, 3], dtype=torch.uint8)).reason  # its step is 255, or -1
