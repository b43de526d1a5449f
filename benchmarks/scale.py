"""Beyond one machine: a plan of 70 B on the meta device, and checkpoints converted as a stream.

python benchmarks/scale.py plan                       time and memory of planning a Llama of 8 to 80 layers
python benchmarks/scale.py convert --gigabytes 8      converted and back, beside cp of the same files
python benchmarks/scale.py kills --times 50           killed at random moments, and started again
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import statistics
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.what == "plan-of":
        print(json.dumps(plan_of(options.layers)))
        return
    made: Any
    if options.what == "plan":
        made = plans_of(8, 20, 40, 80)
    elif options.what == "convert":
        made = in_a_folder(lambda place: convert_beside_cp(place, options.gigabytes, options.rounds))
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


def plans_of(*sizes: int) -> dict[str, Any]:
    """Plans of several depths, and how the processor's seconds that a further layer costs differ among them."""
    rows = [fresh_plan(layers) for layers in sizes]
    added = [row["cpu_seconds_for_an_added_layer"] for row in rows]
    return {
        "rows": rows,
        "spread_for_an_added_layer": max(added) / min(added) - 1,
        "within_the_goals": rows[-1]["start_seconds"] + rows[-1]["seconds"] <= GOAL_SECONDS
        and rows[-1]["megabytes"] <= GOAL_MEGABYTES,
    }


def fresh_plan(layers: int) -> dict[str, Any]:
    """In a process of its own, so that its peak memory is its own."""
    command = [sys.executable, __file__, "plan-of", "--layers", str(layers)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def plan_of(layers: int) -> dict[str, Any]:
    """Plan a model; and before, small ones, which take what is done once in a process, and once in every export."""
    start = planned(2)
    single = statistics.median(planned(1)["cpu_seconds"] for _ in range(3))
    runs = [planned(layers) for _ in range(1 if layers >= 40 else 3)]
    made = sorted(runs, key=lambda run: run["cpu_seconds"])[len(runs) // 2]
    return {
        "start_seconds": start["seconds"],
        **made,
        "cpu_seconds_of_one_layer": single,
        "cpu_seconds_for_an_added_layer": (made["cpu_seconds"] - single) / (layers - 1),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def planned(layers: int) -> dict[str, Any]:
    """Capture a Llama of the shape of 70 B without weights, and plan MergeLinears."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import refold

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128256, num_hidden_layers=layers)).eval()
        tokens = torch.zeros(2, 8, dtype=torch.long)
    begun, processor = time.perf_counter(), time.process_time()
    gm = refold.trace(model, input_ids=tokens)
    captured = time.perf_counter()
    refold.MergeLinears()(gm)
    maps = len(refold.plan(gm).maps)
    return {
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "capture_seconds": captured - begun,
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - processor,
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


_COMMAND = """
import pathlib, sys
from refold.cli import main
code = main(sys.argv[2:])
status = pathlib.Path("/proc/self/status").read_text()
pathlib.Path(sys.argv[1]).write_text(status.split("VmHWM:")[1].split()[0])
sys.exit(code)
"""
"""The command, which writes its peak memory in kB into a file: what the system tells its parent counts that one too."""


def converted(source: Path, out: Path, to: str) -> list[str]:
    peak = source.parent / "peak"
    return [
        *(sys.executable, "-c", _COMMAND, str(peak)),
        *("convert", str(source), "--out", str(out), "--to", to, "--json"),
    ]


def convert_beside_cp(place: Path, gigabytes: float, rounds: int) -> dict[str, Any]:
    """cp, conversion and the way back in turn, each followed by sync; the middle of the rounds counts."""
    source = write_source(place / "source", gigabytes)
    size = sum(path.stat().st_size for path in source.iterdir())
    os.sync()
    rows = [one_round(place, source) for _ in range(rounds)]
    shares = {name: statistics.median(row["cp"] / row[name] for row in rows) for name in ("there", "back")}
    facts = json.loads((place / "facts.json").read_text())
    return {
        "bytes": size,
        "rounds": rows,
        "seconds": {name: statistics.median(row[name] for row in rows) for name in ("cp", "there", "back")},
        "share_of_the_speed_of_cp": shares,
        "largest_group_bytes": facts["largest_group"],
        "peak_megabytes": max(row["peak_megabytes"] for row in rows),
        "peak_bound_megabytes": 2 * facts["largest_group"] / 1e6 + 300,
        "same_files": all(row["same_files"] for row in rows),
    }


def one_round(place: Path, source: Path) -> dict[str, Any]:
    """Seconds until everything is on the disk, of each of the three; their results are deleted."""
    copied, fused, back = (place / name for name in ("copied", "fused", "back"))
    seconds = run_synced(["cp", "-r", str(source), str(copied)])
    shutil.rmtree(copied)
    there = run_synced(converted(source, fused, "vllm"), place / "facts.json")
    peak = int((place / "peak").read_text())
    again = run_synced(converted(fused, back, "hf"))
    peak = max(peak, int((place / "peak").read_text()))
    same = all(filecmp.cmp(path, back / path.name, shallow=False) for path in source.iterdir())
    for folder in (fused, back):
        shutil.rmtree(folder)
    load = os.getloadavg()[0]  # above the number of cores, others take part of each
    return {
        "cp": seconds,
        "there": there,
        "back": again,
        "load": load,
        "peak_megabytes": peak * 1024 / 1e6,
        "same_files": same,
    }


def run_synced(command: list[str], told: Path | None = None) -> float:
    """Seconds until all that a command wrote is on the disk; what it says goes into a file."""
    os.sync()
    begun = time.perf_counter()
    with open(told or os.devnull, "wb") as out:
        subprocess.run(command, check=True, stdout=out, stderr=subprocess.DEVNULL)
    os.sync()
    return time.perf_counter() - begun


def killed(place: Path, times: int, gigabytes: float, seed: int) -> dict[str, Any]:
    """Kill a conversion at random moments of its work, start it again, and compare every byte."""
    source, out = write_source(place / "source", gigabytes), place / "out"
    process, begun = begun_conversion(source, out)
    assert process.wait() == 0
    seconds = time.perf_counter() - begun
    wanted = folder_hashes(out)
    drawn, identical, stopped = random.Random(seed), 0, 0
    for _ in range(times):
        shutil.rmtree(out)
        process, begun = begun_conversion(source, out)
        try:
            process.wait(max(0, begun + drawn.uniform(0, seconds) - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            stopped += process.wait() == -signal.SIGKILL
        run_synced(converted(source, out, "vllm"))
        identical += folder_hashes(out) == wanted
    return {"times": times, "killed": stopped, "identical": identical, "seconds_of_work": seconds}


def begun_conversion(source: Path, out: Path) -> tuple[Any, float]:
    """A conversion, from when it has its work folder on."""
    work = out.parent / f".{out.name}.converting"
    process = subprocess.Popen(converted(source, out, "vllm"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not work.exists() and process.poll() is None:
        time.sleep(0.001)
    return process, time.perf_counter()


def folder_hashes(folder: Path) -> dict[str, str]:
    """A hash of every file in a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


if __name__ == "__main__":
    main()
