"""How a run on the simulated card ends: what is in flight, reported, and left behind."""

import signal

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


# Its thread still waits when the process ends. One whose work is done while the interpreter ends is
# aborted by PyTorch, as on any card: what it returns to needs the interpreter.
WAITING_THREAD = """
    from torch_residency import sim
    sim.hold(side)
    with torch.cuda.stream(side):
        y.relu()
    threading.Thread(target=torch.cuda.synchronize, daemon=True).start()
"""


@pytest.mark.parametrize(
    "ending, status, said",
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("os._exit(5)", 5, None),
        ("from torch_residency import sim; sim.hold(side); torch.ones(3, device='cuda')", 0, ""),
        (WAITING_THREAD.strip(), 0, ""),
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


TERMINATED = 128 + signal.SIGTERM


def test_sigterm_ends_a_script_as_sys_exit_would(sim_process):
    code = """
        import os, signal, torch
        torch.ones(1, device="cuda")
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            print("cleaned up")
    """
    run = sim_process.run_code(code, timeout=60)
    assert (run.status, run.output) == (TERMINATED, "cleaned up\n"), run.errors
    assert run.errors.startswith("--- simulated card")
    assert run.report["devices"][0]["peak_allocated_bytes"] == 512


def test_a_handler_of_the_scripts_own_takes_sigterm(sim_process):
    code = """
        import os, signal
        print(signal.signal(signal.SIGTERM, lambda *_: print("handled")) is not None)
        os.kill(os.getpid(), signal.SIGTERM)
    """
    run = sim_process.run_code(code, timeout=60)
    assert (run.status, run.output) == (0, "True\nhandled\n"), run.errors


def test_sigterm_ends_a_forked_child_at_once(sim_process):
    code = """
        import os, signal
        pid = os.fork()
        if pid == 0:
            try:
                signal.pause()
            finally:
                print("must not run", flush=True)
        os.kill(pid, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    run = sim_process.run_code(code, timeout=60)
    assert (run.status, run.output) == (0, f"{-signal.SIGTERM}\n"), run.errors


@pytest.mark.parametrize(
    "ending",
    ["pass", "os._exit(0)", "os.abort()", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 15)"],
)
def test_nothing_is_left_behind(sim_process, tmp_path, ending):
    folder = tmp_path / "temporary"
    folder.mkdir()
    code = f"import os, torch\ntorch.ones(1, device='cuda')\n{ending}\n"
    sim_process.run_code(code, TMPDIR=str(folder), timeout=60)
    assert [path.name for path in folder.iterdir() if "residency" in path.name] == []


def test_a_child_that_did_not_use_its_card_does_not_report(sim_process):
    code = """
        import subprocess, sys
        look = "import torch; torch.cuda.init(); print(torch.cuda.get_device_name())"
        for use in ("", "; torch.ones(1, device='cuda')"):
            subprocess.run([sys.executable, "-c", look + use], check=True)
    """
    run = sim_process.run_code(code)
    assert run.status == 0, run.errors
    assert run.output.count("H200") == 2
    (child,) = run.report["children"]
    assert child["devices"][0]["peak_allocated_bytes"] == 512
    assert run.errors.count("--- child process") == 1
