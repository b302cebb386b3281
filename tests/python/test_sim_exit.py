"""How a run on the simulated card ends: what is in flight, reported, and left behind."""

import pytest

IN_FLIGHT = """
    import os, sys, threading, torch

    side = torch.cuda.Stream()
    x = torch.randn(1000, 1000, device="cuda")
    with torch.cuda.stream(side):
        y = torch.randn(1000, 1000, device="cuda")
        for _ in range(50):
            y = y @ y
    kept = [x]
    for _ in range(50):
        x = x @ x
        kept.append(x.relu())
    host = torch.empty(1000, 1000, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
"""


@pytest.mark.parametrize(
    "ending, status, said",
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("os._exit(5)", 5, None),
        ("from torch_residency import sim; sim.hold(side); torch.ones(3, device='cuda')", 0, ""),
        ("threading.Thread(target=torch.cuda.synchronize, daemon=True).start()", 0, ""),
    ],
    ids=["end", "exit", "exception", "os._exit", "held", "waiting thread"],
)
def test_work_in_flight_at_the_end_is_abandoned(sim_process, ending, status, said):
    run = sim_process.run_code(IN_FLIGHT + "    " + ending, timeout=60)
    assert run.status == status, run.errors
    if said is None:
        return  # no report
    before, _, report = run.errors.partition("--- simulated card: ")
    assert before.rstrip().endswith(said)
    assert before == "" or said
    assert report.endswith(
        "order: deterministic\n" if "Thread" not in ending else "deterministic\n"
    )
