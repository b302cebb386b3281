"""What the simulated card cannot do is refused with one line, before the script runs."""

import pytest

ASYNC = "backend:cudaMallocAsync"


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", [ASYNC, f"max_split_size_mb:32, {ASYNC}"])
def test_the_allocator_of_the_driver_is_refused(sim_process, variable, value):
    run = sim_process.run_code("print('must not run')", **{variable: value})
    assert (run.status, run.output) == (2, "")
    assert run.errors == (
        f"torch_residency.sim: {variable} asks for backend:cudaMallocAsync, which is not "
        "simulated: expected torch's own allocator, backend:native\n"
    )


def test_the_allocator_of_the_driver_is_refused_in_a_child_too(sim_process):
    code = """
        import os, subprocess, sys
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
        child = [sys.executable, "-c", "import torch; print('must not run')"]
        print(subprocess.run(child).returncode)
    """
    run = sim_process.run_code(code)
    assert (run.status, run.output) == (0, "2\n"), run.errors
    assert run.errors.startswith("torch_residency.sim: PYTORCH_CUDA_ALLOC_CONF asks for ")


def test_other_options_of_the_allocator_are_not(sim_process):
    options = "backend:native,expandable_segments:True"
    run = sim_process.run_code(
        "import torch; print(torch.ones(3, device='cuda').sum().item())",
        PYTORCH_CUDA_ALLOC_CONF=options,
    )
    assert (run.status, run.output) == (0, "3.0\n"), run.errors


def test_an_allocator_of_the_scripts_own_is_reported_by_the_memory_of_the_device(sim_process):
    # The runtime itself as the allocator: cudaMalloc behind torch's interface.
    code = """
        import ctypes, torch
        from torch_residency.sim import _library

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        def allocate(size, device, stream):
            pointer = ctypes.c_void_p()
            assert _library.runtime().cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
            return pointer.value

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        def free(pointer, size, device, stream):
            _library.runtime().cudaFree(ctypes.c_void_p(pointer))

        addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in (allocate, free)]
        allocator = torch._C._cuda_customAllocator(*addresses)
        torch._C._cuda_changeCurrentAllocator(allocator)
        x = torch.ones(1 << 20, device="cuda")
        print(x.sum().item())
        del x
    """
    run = sim_process.run_code(code)
    assert (run.status, run.output) == (0, "1048576.0\n"), run.errors
    assert "device 0: peak 6.00 MiB, by an allocator of the script's own" in run.errors


@pytest.mark.parametrize("memory", ["0", "24", "24B", "63MiB", "24GiBs"])
def test_memory_that_no_card_has_is_refused(sim_process, memory):
    run = sim_process.run_code("print('must not run')", f"--memory={memory}")
    assert (run.status, run.output) == (2, "")
    assert run.errors == (
        f"torch_residency.sim: 'memory' is '{memory}', expected a size of at least 64MiB with its "
        "unit, such as 24GiB\n"
    )


@pytest.mark.parametrize("option", ["json", "timeline"])
def test_a_file_that_cannot_be_written_is_refused(sim_process, tmp_path, option):
    script = sim_process.script("print('must not run')")
    for target, reason in (
        (tmp_path, "it is a folder, expected a file"),
        (tmp_path / "no" / "file", f"there is no folder '{tmp_path / 'no'}'"),
    ):
        process = sim_process.python("-m", "torch_residency.sim", f"--{option}", target, script)
        assert (process.returncode, process.stdout) == (2, "")
        last = process.stderr.splitlines()[-1]
        assert last.endswith(f"argument --{option}: cannot write '{target}': {reason}")


def test_a_file_that_turns_out_not_to_be_writable_costs_its_contents_only(sim_process):
    script = sim_process.script("import torch; torch.ones(1, device='cuda'); raise SystemExit(3)")
    process = sim_process.python("-m", "torch_residency.sim", "--json", "/dev/full", script)
    assert process.returncode == 3
    assert "--- simulated card" in process.stderr
    assert "Traceback" not in process.stderr
    assert process.stderr.splitlines()[-1].startswith(
        "torch_residency.sim: cannot write '/dev/full'"
    )
