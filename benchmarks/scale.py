"""Beyond one machine: a plan of 70 B on the meta device, and checkpoints converted as a stream.

python benchmarks/scale.py plan                       time and memory of planning a Llama of 8, 20 and 80 layers
python benchmarks/scale.py convert --gigabytes 8      converted and back, beside cp of the same files
python benchmarks/scale.py kills --times 50           killed at random moments, and started again
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from models import machine

RESULTS = Path(__file__).parent / "results" / "scale.json"
GOAL_SECONDS, GOAL_MEGABYTES = 60, 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plan", "plan-of", "convert", "kills"])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.what == "plan-of":
        print(json.dumps(plan_of(options.layers)))
        return
    made: Any
    if options.what == "plan":
        made = [fresh_plan(layers) for layers in (8, 20, 80)]
    elif options.what == "convert":
        made = in_a_folder(lambda place: convert_beside_cp(place, options.gigabytes))
    else:
        made = in_a_folder(lambda place: killed(place, options.times, options.gigabytes, options.seed))
    print(json.dumps(made, indent=1))
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(kept | {options.what: made, "machine": machine("cpu")}, indent=1) + "\n")


def in_a_folder(work: Any) -> Any:
    place = Path(tempfile.mkdtemp(prefix="scale-"))
    try:
        return work(place)
    finally:
        shutil.rmtree(place)


# --- plans ---------------------------------------------------------------------------------------------------------


def fresh_plan(layers: int) -> dict[str, Any]:
    """In a process of its own, so that its peak memory is its own."""
    command = [sys.executable, __file__, "plan-of", "--layers", str(layers)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def plan_of(layers: int) -> dict[str, Any]:
    """Capture a Llama of the shape of 70 B without weights, and plan MergeLinears."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import refold

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128256, num_hidden_layers=layers)).eval()
        tokens = torch.zeros(2, 8, dtype=torch.long)
    begun = time.perf_counter()
    gm = refold.trace(model, input_ids=tokens)
    captured = time.perf_counter()
    refold.MergeLinears()(gm)
    maps = len(refold.plan(gm).maps)
    return {
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "capture_seconds": captured - begun,
        "seconds": time.perf_counter() - begun,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        "maps": maps,
    }


# --- checkpoints ---------------------------------------------------------------------------------------------------


def write_source(folder: Path, gigabytes: float) -> Path:
    """Shards of about 1 GB (or four, if less) of a decoder with grouped queries, in random bits."""
    from safetensors.torch import save_file

    folder.mkdir()
    width, files = 2048, max(4, round(gigabytes))
    layer = {"q": (width, width), "k": (width // 4, width), "v": (width // 4, width), "o": (width, width)}
    per_layer = 2 * (sum(rows * columns for rows, columns in layer.values()) + 3 * 4 * width * width)
    layers = max(files, round(gigabytes * 1e9 / per_layer))
    placed: dict[str, str] = {}
    for number in range(files):
        tensors: dict[str, torch.Tensor] = {}
        for i in range(number * layers // files, (number + 1) * layers // files):
            path = f"model.layers.{i}"
            shapes = {f"{path}.self_attn.{n}_proj.weight": shape for n, shape in layer.items()}
            shapes |= {f"{path}.mlp.{n}_proj.weight": (4 * width, width) for n in ("gate", "up")}
            shapes |= {f"{path}.mlp.down_proj.weight": (width, 4 * width)}
            tensors |= {
                n: torch.randint(-(2**15), 2**15, s, dtype=torch.int16).view(torch.bfloat16) for n, s in shapes.items()
            }
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def converted(source: Path, out: Path, to: str) -> list[str]:
    return [sys.executable, "-m", "refold", "convert", str(source), "--out", str(out), "--to", to, "--json"]


def run(command: list[str]) -> tuple[float, float]:
    """Seconds, and the peak memory of the process in MB."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return time.perf_counter() - begun, usage.ru_maxrss / 1000


def convert_beside_cp(place: Path, gigabytes: float) -> dict[str, Any]:
    source = write_source(place / "source", gigabytes)
    size = sum(path.stat().st_size for path in source.iterdir())
    os.sync()
    copied, _ = run(["cp", "-r", str(source), str(place / "copied")])
    begun = time.perf_counter()
    os.sync()
    synced = time.perf_counter() - begun
    there, peak = run(converted(source, place / "fused", "vllm"))
    back, peak_back = run(converted(place / "fused", place / "back", "hf"))
    same = all(path.read_bytes() == (place / "back" / path.name).read_bytes() for path in source.iterdir())
    return {
        "bytes": size,
        "cp_seconds": copied,
        "cp_and_sync_seconds": copied + synced,
        "convert_seconds": there,
        "back_seconds": back,
        "share_of_the_speed_of_cp": copied / there,
        "share_of_the_speed_of_cp_and_sync": (copied + synced) / there,
        "peak_megabytes": max(peak, peak_back),
        "same_files": same,
    }


def killed(place: Path, times: int, gigabytes: float, seed: int) -> dict[str, Any]:
    """Kill a conversion at random moments of its time, start it again, and compare every byte."""
    source = write_source(place / "source", gigabytes)
    seconds, _ = run(converted(source, place / "whole", "vllm"))
    wanted = {path.name: path.read_bytes() for path in (place / "whole").iterdir()}
    drawn, identical, stopped = random.Random(seed), 0, 0
    for _ in range(times):
        out = place / "out"
        process = subprocess.Popen(converted(source, out, "vllm"), stdout=subprocess.DEVNULL)
        try:
            process.wait(drawn.uniform(0, seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            stopped += process.wait() == -signal.SIGKILL
        run(converted(source, out, "vllm"))
        identical += {path.name: path.read_bytes() for path in out.iterdir()} == wanted
        shutil.rmtree(out)
    return {"times": times, "killed": stopped, "identical": identical, "seconds_of_a_whole_one": seconds}


if __name__ == "__main__":
    main()
