"""PyTorch's profiler on the simulated card shows the modelled times, to the nanosecond."""

import json

import pytest

# Rows of a timeline and of a chrome trace, so that they compare: (kind, stream, duration in ns), in
# the order of the virtual clock.
ROWS = """
import json
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch_residency import sim

BOTH = [ProfilerActivity.CPU, ProfilerActivity.CUDA]

def in_ns(microseconds):
    return round(microseconds * 1000)

def timeline(path):
    kinds = {"copy H2D": "HtoD", "copy H2D (pageable)": "HtoD", "copy D2H": "DtoH",
             "copy D2H (pageable)": "DtoH", "copy D2D": "DtoD", "memset": "Memset"}
    events = json.load(open(path))["traceEvents"]
    return [
        {"kind": kinds.get(e["name"], e["name"]), "stream": e["tid"],
         "start": in_ns(e["ts"]), "duration": in_ns(e["dur"])}
        for e in events if e["ph"] == "X" and e["pid"] > 0
    ]

def kind_of(event):
    if event["cat"] == "gpu_memcpy":
        return event["name"].split()[1]
    return "Memset" if event["cat"] == "gpu_memset" else event["name"]

def profiled(profiler):
    profiler.export_chrome_trace("trace.json")
    events = json.load(open("trace.json"))["traceEvents"]
    rows = [
        {"kind": kind_of(e), "stream": e["args"]["stream"], "start": in_ns(e["ts"]),
         "duration": in_ns(e["dur"]), "bytes": e["args"].get("bytes")}
        for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(rows, key=lambda row: row["start"])

def say(**values):
    print(json.dumps(values))
"""


@pytest.fixture
def run(sim_process):
    """Runs a script after ROWS; returns what it said last, and its run."""

    def run(code: str, *options, **environment):
        script = sim_process.work_folder / "script.py"
        script.write_text(ROWS + code)
        result = sim_process.run(*options, script, **environment)
        assert result.status == 0, result.errors
        return json.loads(result.output.splitlines()[-1]), result

    return run


def without_start(rows):
    return [(row["kind"], row["stream"], row["duration"]) for row in rows]


def relative_starts(rows):
    return [row["start"] - rows[0]["start"] for row in rows]


WORK = """
x = torch.randn(1024, 1024, device="cuda")
host = torch.randn(1 << 20).pin_memory()
back = torch.empty(1024, 1024).pin_memory()
side = torch.cuda.Stream()
torch.cuda.synchronize()
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
with sim.timeline("timeline.json"), profile(activities=BOTH) as profiler:
    with record_function("my label"):
        begin.record()
        y = x @ x
        end.record()
    with torch.cuda.stream(side):
        on_device = host.to("cuda", non_blocking=True)
    z = y.clone()
    back.copy_(z, non_blocking=True)
    torch.cuda.synchronize()
"""


def test_device_work_is_that_of_the_timeline(run):
    said, result = run(
        WORK
        + """
say(profiled=profiled(profiler), timeline=timeline("timeline.json"),
    elapsed_ns=in_ns(begin.elapsed_time(end) * 1000), side=side.stream_id)
"""
    )
    rows = said["profiled"]
    expected = sorted(said["timeline"], key=lambda row: row["start"])
    assert sorted(row["kind"] for row in rows) == ["DtoD", "DtoH", "HtoD", "aten::mm"]
    assert without_start(rows) == without_start(expected)
    assert relative_starts(rows) == relative_starts(expected)
    by_kind = {row["kind"]: row for row in rows}
    assert by_kind["HtoD"]["bytes"] == 4 << 20
    assert by_kind["DtoH"]["bytes"] == 4 << 20
    # An event's time includes the launch before it, which is no part of the kernel.
    assert 0 < by_kind["aten::mm"]["duration"] <= said["elapsed_ns"]
    # What runs on one stream does not overlap; the copy of the other does.
    assert by_kind["HtoD"]["stream"] != by_kind["aten::mm"]["stream"]
    main = [row for row in rows if row["stream"] == by_kind["aten::mm"]["stream"]]
    assert [row["kind"] for row in main] == ["aten::mm", "DtoD", "DtoH"]
    for earlier, later in zip(main, main[1:], strict=False):
        assert earlier["start"] + earlier["duration"] <= later["start"]
    kernel, copy = by_kind["aten::mm"], by_kind["HtoD"]
    assert copy["start"] < kernel["start"] + kernel["duration"]
    assert kernel["start"] < copy["start"] + copy["duration"]
    assert "simcuda:" not in result.errors


def test_device_time_is_attributed_to_operators(run):
    said, _ = run(
        WORK
        + """
averages = {(a.key, str(a.device_type)): a for a in profiler.key_averages()}
def of(key):
    return averages[(key, "DeviceType.CPU")]
say(mm_ns=in_ns(of("aten::mm").device_time_total),
    copies_ns=in_ns(of("aten::copy_").device_time_total),
    label_ns=in_ns(of("my label").device_time_total), profiled=profiled(profiler),
    spans=[e["dur"] for e in json.load(open("trace.json"))["traceEvents"]
           if e.get("cat") == "gpu_user_annotation" and e["name"] == "my label"],
    table=profiler.key_averages().table(sort_by="cuda_time_total"))
"""
    )
    durations = {row["kind"]: row["duration"] for row in said["profiled"]}
    assert said["mm_ns"] == said["label_ns"] == durations["aten::mm"]
    assert said["copies_ns"] == sum(durations[kind] for kind in ("HtoD", "DtoD", "DtoH"))
    assert len(said["spans"]) == 1
    assert "Self CUDA" in said["table"]


def test_only_active_steps_are_shown(run):
    said, _ = run(
        """
x = torch.ones(512, 512, device="cuda")
traces = []
steps = schedule(wait=1, warmup=1, active=2, repeat=2)
with profile(activities=BOTH, schedule=steps,
             on_trace_ready=lambda p: traces.append(profiled(p))) as profiler:
    for step in range(8):
        # As many kernels as the step's number says, and never a wait for the device.
        for _ in range(step + 1):
            y = x @ x
        profiler.step()
say(traces=traces)
""",
        "--set",
        "host_call=0",
        "--set",
        "launch=0",
    )
    assert [[row["kind"] for row in trace] for trace in said["traces"]] == [
        ["aten::mm"] * (3 + 4),
        ["aten::mm"] * (7 + 8),
    ]
    durations = {row["duration"] for trace in said["traces"] for row in trace}
    assert len(durations) == 1


def test_backward_on_another_thread_is_attributed(run):
    said, _ = run(
        """
x = torch.randn(256, 256, device="cuda", requires_grad=True)
with profile(activities=BOTH) as profiler:
    (x @ x).sum().backward()
kernels = [row["duration"] for row in profiled(profiler) if row["kind"] == "aten::mm"]
averages = {(a.key, str(a.device_type)): a for a in profiler.key_averages()}
def of(key):
    return in_ns(averages[(key, "DeviceType.CPU")].device_time_total)
say(kernels=kernels, total_ns=of("aten::mm"),
    backward_ns=of("autograd::engine::evaluate_function: MmBackward0"))
"""
    )
    assert len(said["kernels"]) == 3
    assert said["total_ns"] == sum(said["kernels"])
    assert said["backward_ns"] >= sum(said["kernels"][1:])


def test_device_alone_can_be_profiled(run):
    said, _ = run(
        """
x = torch.zeros(1 << 20, device="cuda")
with profile(activities=[ProfilerActivity.CUDA]) as profiler:
    x.add_(1)
    torch.cuda.synchronize()
say(profiled=profiled(profiler))
"""
    )
    assert [row["kind"] for row in said["profiled"]] == ["aten::add_.Tensor"]


def test_work_that_the_model_has_slower_than_this_machine_is_shown(run):
    """Kineto drops what ends after it was stopped, so the host really waits."""
    said, _ = run(
        """
host = torch.empty(1 << 18).pin_memory()
with profile(activities=BOTH) as profiler:
    for _ in range(3):
        host.cuda(non_blocking=True)
say(profiled=profiled(profiler))
""",
        "--dry",
        "--h2d",
        "10MB/s",
    )
    assert [row["kind"] for row in said["profiled"]] == ["HtoD"] * 3
    assert all(row["duration"] > 100_000_000 for row in said["profiled"])


def test_nodes_of_a_graph_are_shown(run):
    said, _ = run(
        """
x = torch.ones(512, 512, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x @ x
    z = y + 1
with sim.timeline("timeline.json"), profile(activities=BOTH) as profiler:
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
say(profiled=profiled(profiler), timeline=timeline("timeline.json"))
"""
    )
    assert [row["kind"] for row in said["profiled"]] == ["aten::mm", "aten::add.Tensor"] * 2
    assert without_start(said["profiled"]) == without_start(said["timeline"])


def test_nothing_is_kept_of_work_outside_the_profile(run):
    said, _ = run(
        """
x = torch.ones(512, 512, device="cuda")
y = x @ x
with profile(activities=BOTH) as first:
    x.add_(1)
y = x @ x
torch.cuda.synchronize()
with profile(activities=BOTH) as second:
    x.mul_(2)
with profile(activities=[ProfilerActivity.CPU]) as host_only:
    x.mul_(2)
    torch.cuda.synchronize()
say(first=profiled(first), second=profiled(second), host_only=profiled(host_only))
"""
    )
    assert [row["kind"] for row in said["first"]] == ["aten::add_.Tensor"]
    assert [row["kind"] for row in said["second"]] == ["aten::mul_.Tensor"]
    assert said["host_only"] == []
