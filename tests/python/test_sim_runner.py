"""python -m torch_residency.sim: scripts that know nothing of this project, and the report."""

import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

MIB = 2**20

TRAINING = """
    import torch

    model = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(torch.ones(8, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("loss", round(loss.item(), 3))
"""


def test_a_plain_script_runs_and_is_reported(sim_process):
    run = sim_process.run_code(TRAINING, "--memory=2GiB")
    assert run.status == 0, run.errors
    assert run.output.startswith("loss ")  # and nothing else: the report is on standard error
    assert len(run.output.splitlines()) == 1
    for line in (
        r"--- simulated card: 1 x h200 with 2(\.00 )?GiB, computing",
        r"device 0: peak allocated \d.*, peak reserved 2\.00 MiB, allocator retries 0, "
        r"out of memory 0",
        r"page-locked on the host: peak ",
        r"copied: .* to the device .*, .* to the host",
        r"the host waited for the device: \d+ calls?, \d+ of them while it was busy",
        r"modelled time: \d+\.\d+ (us|ms|s)",
        r"order: deterministic",
    ):
        assert re.search(f"^{line}", run.errors, re.MULTILINE), (line, run.errors)
    report = run.report
    assert report["optimizer_steps"] == report["backward_calls"] == 3
    assert report["devices"][0]["peak_allocated_bytes"] >= 2 * 256 * 256 * 4
    assert report["copies"]["h2d"]["bytes"] >= 256 * 257 * 4
    assert report["modelled_time_ns"] > 0
    assert report["kernels"] > 0


def test_figures_repeat_exactly(sim_process):
    first, second = (sim_process.run_code(TRAINING).report for _ in range(2))
    for report in (first, second):
        assert report["deterministic"]
        del report["pid"]
    assert first == second


def test_autograds_thread_leaves_nothing_to_chance(sim_process):
    # It drops the callbacks of a backward pass that has ended while the script goes on.
    run = sim_process.run_code("""
        import torch

        model = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(4, 8, 8, device="cuda")).square().mean().backward()
            optimizer.step()
    """)
    assert run.report["deterministic"], run.errors


def test_arguments_name_path_and_main_are_those_of_python(sim_process):
    code = """
        import sys, os, pickle, torch
        class Thing: pass
        pickle.loads(pickle.dumps(Thing()))
        print(__name__, sys.argv, sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
        print(sys.modules["__main__"].Thing is Thing, __spec__, __package__)
    """
    script = sim_process.script(code)
    run = sim_process.run(script, "--epochs", "3", "-m", "x")
    plain = sim_process.python(script, "--epochs", "3", "-m", "x")
    assert run.status == 0, run.errors
    assert run.output == plain.stdout


def test_a_module_runs_as_with_m(sim_process):
    sim_process.script("print('sibling')", "sibling.py")
    sim_process.script(
        """
        import sys, sibling, torch
        print(sys.argv[1:], torch.ones(2, device='cuda').sum().item())
        """,
        "program.py",
    )
    run = sim_process.run("-m", "program", "--memory", "x")
    assert (run.status, run.output) == (0, "sibling\n['--memory', 'x'] 2.0\n"), run.errors


@pytest.mark.parametrize(
    "ending, status",
    [("sys.exit(7)", 7), ("sys.exit('no data')", 1), ("sys.exit()", 0), ("1 / 0", 1)],
)
def test_the_exit_status_is_the_scripts_and_the_report_comes_all_the_same(
    sim_process, ending, status
):
    run = sim_process.run_code(f"import sys, torch\ntorch.ones(1, device='cuda')\n{ending}\n")
    assert run.status == status
    assert "--- simulated card" in run.errors
    assert run.report["devices"][0]["peak_allocated_bytes"] == 512


def test_a_traceback_begins_in_the_script(sim_process):
    script = sim_process.script("def divide():\n    return 1 / 0\n\ndivide()\n")
    run = sim_process.run(script)
    plain = sim_process.python(script)
    assert run.errors.partition("--- simulated card")[0] == plain.stderr


def test_an_interrupt_is_reported(sim_process):
    run = sim_process.run_code(
        """
        import os, signal, torch
        # A shell starts what runs in its background with interrupts ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.ones(1, device='cuda')
        os.kill(os.getpid(), signal.SIGINT)
        """
    )
    assert run.status == 128 + signal.SIGINT
    assert "KeyboardInterrupt" in run.errors
    assert "--- simulated card" in run.errors


# ---- Out of memory


def test_out_of_memory_says_at_which_step_and_line(sim_process):
    code = """
        import torch

        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = []
        for step in range(100):
            kept.append(torch.empty(100 << 20, dtype=torch.uint8, device="cuda"))  # line 8
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
    """
    run = sim_process.run_code(code, "--memory=512MiB")
    assert run.status == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in run.errors
    assert re.search(
        r"^first out of memory: 100\.00 MiB on device 0 at script\.py:8, "
        r"after 5 optimizer steps and 5 backward calls$",
        run.errors,
        re.MULTILINE,
    ), run.errors
    (event,) = run.report["out_of_memory"]
    assert (event["steps"], event["backwards"], event["where"]) == (5, 5, "script.py:8")
    assert run.report["devices"][0]["out_of_memory"] == 1
    assert run.report["devices"][0]["alloc_retries"] == 1


def test_out_of_memory_in_backward_names_the_line_that_called_it(sim_process):
    # On one core the script is at its end before autograd's thread has freed the exception, which
    # needs the interpreter: three of four times PyTorch alone aborts the process.
    code = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import torch

        class Hungry(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, g):
                return g + torch.empty(2 << 30, dtype=torch.uint8, device="cuda").numel()

        x = torch.ones(4, device="cuda", requires_grad=True)
        try:
            Hungry.apply(x).sum().backward()
        except torch.OutOfMemoryError:
            print("caught")
    """
    run = sim_process.run_code(code, "--memory=1GiB")
    assert (run.status, run.output) == (0, "caught\n"), run.errors
    (event,) = run.report["out_of_memory"]
    assert event["where"] == "script.py:13"
    assert (event["steps"], event["backwards"]) == (0, 1)


def test_a_step_that_failed_leaves_nothing_behind(sim_process):
    code = """
        import gc
        import torch
        gc.disable()

        def step(num_mib):
            kept = []
            for _ in range(4):
                kept.append(torch.empty(num_mib << 20, dtype=torch.uint8, device="cuda"))

        for num_mib in (400, 300, 200):
            try:
                step(num_mib)
                print("fits", num_mib)
            except torch.OutOfMemoryError:
                print("too large", num_mib)
            print(torch.cuda.memory_allocated())
    """
    run = sim_process.run_code(code, "--memory=1GiB", "--dry")
    assert run.output == "too large 400\n0\ntoo large 300\n0\nfits 200\n0\n", run.errors


def test_peaks_that_the_script_resets_are_kept(sim_process):
    code = """
        import torch
        torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        print(torch.cuda.max_memory_allocated())
    """
    run = sim_process.run_code(code)
    assert run.output == "0\n"
    assert run.report["devices"][0]["peak_allocated_bytes"] == 100 * MIB
    assert run.report["devices"][0]["peak_reserved_bytes"] == 100 * MIB


# ---- Dry


def test_a_model_of_tens_of_gigabytes_runs_dry(sim_process):
    # 12 layers of 64 Mi parameters: 3 GiB of weights, as much of gradients, twice that of AdamW.
    code = """
        import torch

        with torch.device("cuda"):
            model = torch.nn.Sequential(*(torch.nn.Linear(16384, 16384) for _ in range(12)))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            model(torch.empty(4096, 16384, device="cuda")).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(torch.cuda.max_memory_allocated() >> 30)
    """
    run = sim_process.run_code(code, "--dry", "--memory=141GiB")
    assert run.status == 0, run.errors
    weights = 12 * 16384 * 16385 * 4
    assert 4 * weights <= run.report["devices"][0]["peak_allocated_bytes"] <= 6 * weights
    assert run.report["card"]["mode"] == "dry"
    # 2 steps of 6 FLOPs a parameter and row, on a card of less than 1 PFLOP/s in float32.
    assert run.report["modelled_time_ns"] > 2 * 6 * 4096 * 12 * 16384**2 / 1e15 * 1e9

    small = sim_process.run_code(code, "--dry", "--memory=40GiB")
    assert small.status == 1
    assert small.report["out_of_memory"]


# ---- Child processes


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_workers_and_page_locking_work(sim_process, context):
    code = f"""
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        if __name__ == "__main__":
            data = TensorDataset(torch.arange(64.0))
            loader = DataLoader(data, batch_size=16, num_workers=2, pin_memory=True,
                                multiprocessing_context="{context}")
            total = torch.zeros((), device="cuda")
            for (batch,) in loader:
                assert batch.is_pinned()
                total += batch.to("cuda", non_blocking=True).sum()
            print(total.item())
    """
    run = sim_process.run_code(code)
    assert (run.status, run.output) == (0, "2016.0\n"), run.errors
    assert run.report["peak_pinned_bytes"] > 0


def test_spawned_ranks_have_the_card_and_report(sim_process):
    code = """
        import torch
        import torch.distributed as dist

        def work(rank, port):
            torch.cuda.set_device(rank)
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                                    world_size=2)
            x = torch.full((1024,), rank + 1.0, device="cuda")
            total = x.cpu()
            dist.all_reduce(total)
            assert (x * 0 + total.cuda()).sum().item() == 3 * 1024
            dist.destroy_process_group()

        if __name__ == "__main__":
            import socket
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            torch.multiprocessing.spawn(work, args=(port,), nprocs=2)
            print("done")
    """
    run = sim_process.run_code(code, "--devices=2")
    assert (run.status, run.output) == (0, "done\n"), run.errors
    children = run.report["children"]
    assert len(children) == 2
    peaks = [[d["peak_allocated_bytes"] > 0 for d in child["devices"]] for child in children]
    assert sorted(peaks) == [[False, True], [True, False]]
    assert run.errors.count("--- child process") == 2


def test_programs_that_are_not_python_run_as_ever(sim_process):
    run = sim_process.run_code(
        "import subprocess\nprint(subprocess.check_output(['uname'], text=True), end='')\n"
    )
    assert (run.status, run.output) == (0, "Linux\n"), run.errors


def test_torch_elsewhere_is_not_touched(sim_process):
    process = sim_process.python(
        "-c", "import torch_residency, torch; print(torch.cuda.is_available())"
    )
    assert process.stdout == "False\n", process.stderr


# ---- Refusals: one line that says what was expected, and status 2


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--memory=24parsecs"], "memory"),
        (["--memory=lots"], "memory"),
        (["--devices=0"], "devices"),
        (["--card=voodoo2"], "card"),
        (["--h2d=55"], "h2d"),
        (["--set=colour=red"], "colour"),
        (["--set=colour"], "KEY=VALUE"),
        (["--speed=9"], "--speed"),
        (["--timeline=missing/trace.json"], "missing/trace.json"),
    ],
)
def test_a_bad_option_is_refused(sim_process, options, expected):
    run = sim_process.run_code("print('must not run')", *options)
    assert run.status == 2
    assert run.output == ""
    assert expected in run.errors.strip().splitlines()[-1]
    assert "Traceback" not in run.errors


def test_no_script_is_refused(sim_process):
    assert sim_process.run().status == 2
    run = sim_process.run("missing.py")
    assert run.status == 2
    assert "no script 'missing.py'" in run.errors


def test_a_missing_library_is_refused(sim_process, tmp_path):
    (tmp_path / "empty").mkdir()
    run = sim_process.run_code(
        "print('must not run')", RESIDENCY_SIM_LIBRARIES=str(tmp_path / "empty")
    )
    assert (run.status, run.output) == (2, "")
    assert run.errors.startswith("torch_residency.sim: no libcudart.so.13 in ")
    assert len(run.errors.splitlines()) == 1


def test_a_runtime_of_another_build_is_refused(sim_process, tmp_path, package_folder):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path / "other"
    folder.mkdir()
    source = tmp_path / "other.c"
    source.write_text("int simcuda_present(void) { return 99; }\n")
    for name in ("libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1", "libcupti.so.13"):
        subprocess.run(
            [compiler, "-shared", f"-Wl,-soname,{name}", "-o", folder / name, source], check=True
        )
    (folder / "libresidency_simcuda_operators.so").touch()
    run = sim_process.run_code("print('must not run')", RESIDENCY_SIM_LIBRARIES=str(folder))
    assert (run.status, run.output) == (2, "")
    assert "has version 99 of its control interface" in run.errors


def test_loading_after_torch_is_refused(sim_process):
    code = """
        import torch
        from torch_residency import sim
        assert not sim.is_active()
        try:
            sim.load()
        except sim.SimulationError as error:
            print(error)
        try:
            sim.now_ns()
        except sim.SimulationError as error:
            print(error)
    """
    process = sim_process.python(sim_process.script(code))
    late, absent = process.stdout.splitlines()
    assert late.startswith("torch was imported before the simulated card was loaded")
    assert absent.startswith("there is no simulated card in this process")


def test_importing_the_package_needs_no_torch(sim_process):
    process = sim_process.python(
        "-c", "import sys; from torch_residency import sim; print('torch' in sys.modules)"
    )
    assert process.stdout == "False\n", process.stderr


# ---- The usual kinds of script: the same results as on the CPU


@pytest.mark.parametrize("name", ["digits_cnn.py", "small_transformer.py"])
def test_an_example_gives_on_the_card_what_it_gives_on_the_cpu(sim_process, name):
    losses = {}
    for device in ("cuda", "cpu"):
        run = sim_process.run(ROOT / "examples" / name, "--device", device, "--steps", "6")
        assert run.status == 0, run.errors
        losses[device] = [float(x) for x in re.findall(r"loss (\S+)", run.output)]
    assert len(losses["cpu"]) == 6
    assert losses["cuda"] == pytest.approx(losses["cpu"], abs=1e-5)


def test_a_program_that_is_no_script_has_the_card_too(sim_process):
    code = "import sys, torch; print(torch.cuda.mem_get_info()[1]); sys.exit(3)"
    runner = ("-m", "torch_residency.sim", "--memory=512MiB")
    program = (sys.executable, "-c", code)
    run = sim_process.python(*runner, *program)
    assert run.returncode == 3, run.stderr
    assert run.stdout == f"{512 * MIB}\n"
    assert "simulated card" not in run.stderr  # the report is of scripts
    refused = sim_process.python(*runner, "--json=report.json", *program)
    assert refused.returncode == 2
    assert "programs make no report" in refused.stderr
