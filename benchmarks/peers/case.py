"""One system on one workload, on the simulated card: writes what came out as JSON.

python -m torch_residency.sim --memory 4GiB case.py inference.plain RESULT
"""

import copy
import gc
import json
import sys
import tempfile
import warnings
from pathlib import Path

import edges
import inference
import torch
import training
from models import INFERENCE_BATCH, TRAINING_BATCH, WIDTH, Net, cpu_state, max_difference
from torch_residency import sim

PASSES = 3
DEVICE = inference.DEVICE


def measure(run) -> dict:
    """Runs it and returns what the card saw meanwhile, until all of its work is done."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    at_rest = torch.cuda.memory_allocated()
    sim.reset_counters()
    begin = sim.now_ns()
    run()
    counters = sim.counters()  # before the synchronisation that is ours
    torch.cuda.synchronize()
    end = sim.now_ns()
    after = sim.counters()
    copies = (after.h2d, after.d2h)
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "at_rest": at_rest,
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "h2d_bytes": after.h2d.bytes,
        "d2h_bytes": after.d2h.bytes,
        "copies": sum(c.count for c in copies),
        "pageable_copies": sum(c.pageable_count for c in copies),
        "host_syncs": counters.host_syncs,
        "busy_host_syncs": counters.busy_host_syncs,
        "blocked_ns": counters.blocked_time_ns,
        "copy_ns": sum(c.time_ns for c in copies),
        "kernel_ns": after.kernel_time_ns,
        "overlap_ns": after.overlap_time_ns,
        "modelled_ns": end - begin,
        "pinned": sim.pinned_bytes(),
    }


def run_inference(system: str, folder: str) -> dict:
    torch.manual_seed(0)
    model = Net().eval()
    inputs = [torch.randn(INFERENCE_BATCH, WIDTH) for _ in range(PASSES)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        on_card = [x.to(DEVICE) for x in inputs]
        run = inference.attach(system, model, folder)
        for _ in range(inference.warm_ups(system)):
            run(on_card[0])
        outputs = []
        result = measure(lambda: outputs.extend(run(x) for x in on_card))
    differences = [(y.cpu() - z).abs().max().item() for y, z in zip(outputs, expected, strict=True)]
    return {"difference": max(differences), **result}


def run_training(system: str) -> dict:
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    batches = [
        (torch.randn(TRAINING_BATCH, WIDTH), torch.randn(TRAINING_BATCH, WIDTH))
        for _ in range(PASSES + 1)
    ]
    step = training.trainer("cpu", reference)
    expected_losses = [step(*batch).item() for batch in batches]

    on_card = [(x.to(DEVICE), t.to(DEVICE)) for x, t in batches]
    step = training.trainer(system, model)
    losses = [step(*on_card[0]).detach()]
    result = measure(lambda: losses.extend(step(*batch).detach() for batch in on_card[1:]))
    return {
        "difference": max_difference(training.weights(system, model), cpu_state(reference)),
        "loss_difference": max(
            abs(ours.item() - theirs) for ours, theirs in zip(losses, expected_losses, strict=True)
        ),
        **result,
    }


def main() -> None:
    name, result_file = sys.argv[1:]
    warnings.filterwarnings("ignore")
    workload, _, system = name.partition(".")
    with tempfile.TemporaryDirectory() as folder:
        if workload == "inference":
            result = run_inference(system, folder)
        elif workload == "edges":
            result = {"edges": edges.observe_all(system, folder)}
        else:
            result = run_training(system)
    result["deterministic"] = sim.is_deterministic()
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
