"""Whatever form a call is given in, it is one thing afterwards."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

from refold.call_arguments import CallArguments
from refold.errors import BadExample

X = torch.ones(2)


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        (X, 1, ()),
        ((X, 1), 2, ()),
        ([X, 1], 2, ()),
        ({"x": X}, 0, ("x",)),
        (UserDict(x=X), 0, ("x",)),
        (CallArguments((X,), {"y": 1}), 1, ("y",)),
    ],
)
def test_every_form_of_a_call(given: Any, args: int, kwargs: tuple[str, ...]) -> None:
    call = CallArguments.of(given)
    assert len(call.args) == args and tuple(call.kwargs) == kwargs
    assert [tensor is X for tensor in call.tensors] == [True]


def test_no_call() -> None:
    with pytest.raises(BadExample, match=r"example_inputs must be a dict of .* or a tensor, not a str"):
        CallArguments.of("text")


def test_objects_that_a_call_may_write_into_are_refused() -> None:
    call = CallArguments(kwargs={"cache": object()})
    with pytest.raises(BadExample, match=r"may write into one of the example inputs: cache is a builtins\.object"):
        call.checked()
    assert CallArguments((X, [1])).checked().args[0] is X


def test_copied_mapped_and_given() -> None:
    call = CallArguments((X,), {"more": [X]})
    own = call.copy()
    assert own.args[0] is own.kwargs["more"][0] is not X
    assert torch.equal(call.map(torch.neg).kwargs["more"][0], -X)
    assert call.given_to(lambda x, more: more[0] is x)


def test_the_device_is_the_accelerator_that_anything_lies_on() -> None:
    on_meta = nn.Linear(1, 1, device="meta")
    assert CallArguments((X,)).device(on_meta, print) == torch.device("cpu")
    assert CallArguments().device() == torch.device("cpu")
