"""Threads do not disturb each other: two models transformed at once, and one that runs while another is transformed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch.fx import symbolic_trace

import refold
from refold import ChangeTrueDivToMulByInverse, FuseBiasInLinear, MergeLinears, compose
from refold.examples import attention_layers
from refold.testing import Portrait

ROUNDS = 8


def in_threads(*works: Callable[[], None]) -> None:
    """Run functions at the same time; raise what one of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_two_models_in_two_threads() -> None:
    everything = compose(MergeLinears(), FuseBiasInLinear(), ChangeTrueDivToMulByInverse())  # shared by both

    def work(size: int, sites: int) -> Callable[[], None]:
        gm = symbolic_trace(torch.nn.Sequential(*(attention_layers.Attention(size) for _ in range(sites))))
        before, held = Portrait.of(gm), [*gm.parameters()]

        def rounds() -> None:
            for _ in range(ROUNDS):
                everything(gm)
                assert sum("merged" in r.what for r in refold.result(gm).rewritten) == sites
                assert len(refold.history(gm)) == 3
                everything(gm, reverse=True)
                assert before.differences(Portrait.of(gm), same_objects=True) == [] and held

        return rounds

    in_threads(work(4, 1), work(6, 2), work(5, 3))


def test_one_model_runs_while_another_is_transformed() -> None:
    running, inputs = attention_layers.attention()
    gm = symbolic_trace(running)
    MergeLinears()(gm)
    other = symbolic_trace(attention_layers.attention()[0])
    torch.testing.assert_close(gm(*inputs), running(*inputs))
    done = threading.Event()

    def run() -> None:
        gm(*inputs)  # the first call in a thread rounds otherwise than those that follow, whatever the model
        expected = gm(*inputs)
        while not done.is_set():
            assert torch.equal(gm(*inputs), expected)

    def transform() -> None:
        try:
            for _ in range(ROUNDS):
                MergeLinears()(other)
                FuseBiasInLinear()(other)
                refold.undo(other, None)
        finally:
            done.set()

    in_threads(run, transform)
    assert len(refold.history(gm)) == 1 and not refold.history(other)


def test_notes_of_one_thread_are_not_seen_in_another() -> None:
    from refold.record import call_notes

    seen: list[int] = []
    with call_notes.recording() as notes:
        notes.skip("a", "reason")
        in_threads(lambda: seen.append(len(call_notes.current().refused)))
        assert len(call_notes.current().refused) == 1
    assert seen == [0]
