"""What weight maps reach: LoRA rounds beside PEFT, the memory of folding a ResNet-50, loading into a folded BERT.

python benchmarks/weights.py            writes benchmarks/results/weights.json
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import refold
from refold.checkpoints.checkpoint_load import load_original_state_dict
from refold.transformations.merge_lora import MergeLora

RESULTS = Path(__file__).parent / "results" / "weights.json"
ROUNDS = 100


# --- a hundred merges and unmerges ---------------------------------------------------------------------------------


class Layers(nn.Module):
    """Four linear layers of a transformer's size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def lora_rounds(dtype: torch.dtype) -> dict[str, Any]:
    """The same adapted model, merged and unmerged a hundred times by PEFT and by Refold."""
    import peft

    from refold.capture.tracing import trace

    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["0", "1", "2", "3"], init_lora_weights=False)
    theirs = peft.get_peft_model(Layers(), config).eval().to(dtype)
    for name, parameter in theirs.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.05)
    gm = trace(copy.deepcopy(theirs), torch.randn(2, 512, dtype=dtype))
    ours_before = {n: t.clone() for n, t in gm.state_dict().items()}
    theirs_before = {n: t.clone() for n, t in theirs.state_dict().items() if "base_layer.weight" in n}
    times: dict[str, list[float]] = {"refold": [], "peft": []}
    for _ in range(ROUNDS):
        start = time.perf_counter()
        MergeLora()(gm)
        assert len(refold.result(gm).rewritten) == 4
        refold.undo(gm)
        middle = time.perf_counter()
        theirs.merge_adapter()
        theirs.unmerge_adapter()
        times["peft"].append(time.perf_counter() - middle)
        times["refold"].append(middle - start)
    now = theirs.state_dict()
    changed = sum(int((now[n] != t).sum()) for n, t in theirs_before.items())
    return {
        "rounds": ROUNDS,
        "weights": sum(t.numel() for t in theirs_before.values()),
        "refold_weights_changed": sum(int((gm.state_dict()[n] != t).sum()) for n, t in ours_before.items()),
        "peft_weights_changed": changed,
        "peft_version": peft.__version__,
        "seconds_a_round": {name: statistics.median(values) for name, values in times.items()},
    }


# --- folding and unfolding a ResNet-50 -----------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.down = None
        if stride != 1 or inside != 4 * width:
            short = nn.Conv2d(inside, 4 * width, 1, stride, bias=False)
            self.down = nn.Sequential(short, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + (x if self.down is None else self.down(x)))


class ResNet50(nn.Module):
    """ResNet-50 as torchvision builds it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        inside = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(count):
                blocks.append(Bottleneck(inside, width, stride if i == 0 else 1))
                inside = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(2048, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.pool(torch.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


def resnet50(dtype: torch.dtype) -> torch.fx.GraphModule:
    torch.manual_seed(0)
    model = ResNet50().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.1, 3)
                module.weight.uniform_(0.2, 1.5)
                module.bias.normal_()
    return torch.fx.symbolic_trace(model.to(dtype))


class Heap:
    """Bytes in use, counted at every malloc and free by benchmarks/heap.c, Python's own objects included."""

    def __init__(self) -> None:
        counted = ctypes.CDLL(None)
        self._most, self._forget = counted.heap_most, counted.heap_forget_most
        self._most.restype = counted.heap_in_use.restype = ctypes.c_long
        self._in_use = counted.heap_in_use

    def extra(self, act: Callable[[], Any]) -> int:
        """The most bytes that were in use while something was done, beyond those that were before."""
        gc.collect()
        self._forget()
        before = self._in_use()
        act()
        return int(self._most()) - int(before)


def fold_resnet(dtype: torch.dtype) -> dict[str, Any]:
    """Fold and unfold every batch norm three times; run in a process whose mallocs are counted. A first round brings in
    what Python and torch load once."""
    refold.undo(refold.FuseBatchNorm2dInConv2d()(resnet50(dtype)))
    gm, heap = resnet50(dtype), Heap()
    largest = max(p.numel() * p.element_size() for p in gm.parameters())
    prints = {n: refold.fingerprint.fingerprint(t) for n, t in gm.state_dict().items()}
    peaks: dict[str, list[int]] = {"fold": [], "undo": []}
    for _ in range(3):
        peaks["fold"].append(heap.extra(lambda: refold.FuseBatchNorm2dInConv2d()(gm)))
        assert len(refold.result(gm).rewritten) == 53
        held = refold.history(gm).nbytes
        records = [record for change in refold.history(gm) for record in change.maps]
        corrections = sum(r.nbytes for record in records for r in record.corrections.values())
        folded = sum(gm.get_parameter(record.map.targets["weight"]).numel() * dtype.itemsize for record in records)
        del records
        peaks["undo"].append(heap.extra(lambda: refold.undo(gm)))
    return {
        "folded_bytes": folded,
        "largest_layer_bytes": largest,
        "corrections_bytes": corrections,
        "corrections_share": corrections / folded,
        "held_bytes": held,
        "held_share": held / folded,
        "peak_limit_bytes": largest + corrections,
        "peaks_of_three": peaks,
        "peak_extra_bytes": {name: max(values) for name, values in peaks.items()},
        "peak_within_limit": {name: max(values) <= largest + corrections for name, values in peaks.items()},
        "tensors_that_differ_after_undo": sum(
            refold.fingerprint.fingerprint(t) != prints[n] for n, t in gm.state_dict().items()
        ),
    }


def time_resnet(dtype: torch.dtype) -> dict[str, float]:
    """Processor seconds of folding and unfolding every batch norm, the better of two rounds."""
    gm = resnet50(dtype)
    seconds: dict[str, list[float]] = {"fold": [], "undo": []}
    for _ in range(2):
        start = time.process_time()
        refold.FuseBatchNorm2dInConv2d()(gm)
        middle = time.process_time()
        refold.undo(gm)
        seconds["undo"].append(time.process_time() - middle)
        seconds["fold"].append(middle - start)
    return {name: min(values) for name, values in seconds.items()}


def counted(name: str) -> dict[str, Any]:
    """`fold_resnet` in a process of its own in which every byte is counted."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "heap.so"
        source = Path(__file__).with_name("heap.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        command = [sys.executable, __file__, "--one", name]
        extra = {"LD_PRELOAD": str(library), "PYTHONMALLOC": "malloc"}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | extra)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"processor_seconds": time_resnet(DTYPES[name])}


# --- loading a checkpoint ------------------------------------------------------------------------------------------


def load_bert(rounds: int = 15) -> dict[str, Any]:
    """Load a BERT-base checkpoint into the plain module and into the folded one, in turn."""
    import transformers

    from refold.capture.tracing import trace

    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig()).eval()
    ones = torch.ones(1, 16, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ones, "attention_mask": ones.clone()}
    plain = trace(model, **inputs)
    folded = copy.deepcopy(plain)
    refold.MergeLinears()(folded)
    merged = len(refold.result(folded).rewritten)
    checkpoint = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    times: dict[str, list[float]] = {"plain": [], "folded": [], "first": []}
    for i in range(rounds + 2):
        fresh = copy.deepcopy(folded)  # nobody has loaded anything into it yet
        for name in ("plain", "folded", "first") if i % 2 else ("first", "folded", "plain"):
            start = time.perf_counter()
            if name == "plain":
                plain.load_state_dict(checkpoint)
            else:
                load_original_state_dict(folded if name == "folded" else fresh, checkpoint)
            if i >= 2:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "parameters": sum(p.numel() for p in plain.parameters()),
        "sites_merged": merged,
        "seconds": medians,
        "quartiles": {name: statistics.quantiles(values, n=4) for name, values in times.items()},
        "ratio": medians["folded"] / medians["plain"],
        "first_load_ratio": medians["first"] / medians["plain"],
    }


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(fold_resnet(DTYPES[sys.argv[2]])))
        return
    report: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1},
        "lora": {name: lora_rounds(DTYPES[name]) for name in ("bfloat16", "float32")},
        "resnet50": {name: counted(name) for name in DTYPES},
        "bert_base_load": load_bert(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
