"""Kernels compiled at run time: TorchScript does without, the others say that they cannot."""

import re
import shutil

import pytest

MADE_FOR_RUN_TIME = "kernels compiled at run time (NVRTC, Triton) are not simulated"


@pytest.mark.parametrize("make", ["torch.jit.trace(compute, (x, y))", "torch.jit.script(compute)"])
def test_torchscript_runs_operator_by_operator(sim_process, make):
    # Several calls, since the executor fuses what it has seen twice.
    code = f"""
        import torch

        def compute(x, y):
            return (x * 2 + y).tanh() * y.sigmoid() - x.exp()

        torch.manual_seed(0)
        plain = [torch.randn(64, requires_grad=True) for _ in range(2)]
        compute(*plain).square().sum().backward()
        for call in range(5):
            x, y = (t.detach().cuda().requires_grad_() for t in plain)
            if call == 0:
                compiled = {make}
            result = compiled(x, y)
            result.square().sum().backward()
            torch.testing.assert_close(result.cpu(), compute(*plain))
            torch.testing.assert_close(x.grad.cpu(), plain[0].grad)
            torch.testing.assert_close(y.grad.cpu(), plain[1].grad)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x, y).cpu(), compute(*plain))
        print("done")
    """
    run = sim_process.run_code(code)
    assert (run.status, run.output) == (0, "done\n"), run.errors
    assert "simcuda: " not in run.errors


def refusals(run):
    return [line for line in run.errors.splitlines() if line.startswith("simcuda: ")]


def test_jiterator_is_refused_by_name(sim_process):
    code = """
        import torch

        multiply = torch.cuda.jiterator._create_jit_fn(
            "template <typename T> T multiply(T x, T y) { return x * y; }"
        )
        x = torch.ones(4, device="cuda")
        for _ in range(2):
            try:
                multiply(x, x)
            except RuntimeError as error:
                print(error)
        print((x + x).tolist())  # the card is as good as before
    """
    run = sim_process.run_code(code)
    assert run.status == 0, run.errors
    assert run.output.endswith("[2.0, 2.0, 2.0, 2.0]\n")
    (line,) = refusals(run)
    assert re.match("simcuda: cuModuleLoadData(Ex)? is not simulated", line)
    assert MADE_FOR_RUN_TIME in line


def test_the_gpu_fuser_is_refused_when_a_script_asks_for_it(sim_process):
    code = """
        import torch

        torch._C._jit_override_can_fuse_on_gpu(True)
        x = torch.ones(4, device="cuda")
        compiled = torch.jit.trace(lambda x: (x * 2 + 1).tanh(), x)
        for _ in range(3):
            try:
                compiled(x)
            except RuntimeError:
                print("refused")
    """
    run = sim_process.run_code(code)
    assert run.status == 0, run.errors
    assert "refused" in run.output
    (line,) = refusals(run)
    assert MADE_FOR_RUN_TIME in line


needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="Triton needs a C compiler"
)


@needs_compiler
@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
def test_torch_compile_says_which_backends_work(sim_process, tmp_path, backend):
    code = f"""
        import torch

        compiled = torch.compile(lambda x: (x.sin() * 2 + x.cos()).sum(), backend="{backend}")
        print(round(compiled(torch.zeros(8, device="cuda")).item()))
    """
    # Nothing that an earlier run compiled is found again.
    run = sim_process.run_code(
        code, TRITON_CACHE_DIR=str(tmp_path / "t"), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "i")
    )
    if backend == "inductor":
        assert run.status == 1, run.output
        (line,) = refusals(run)
        assert MADE_FOR_RUN_TIME in line
        assert line.endswith('torch.compile works with backend="eager" or "aot_eager"')
        assert "libcuda.so cannot found" not in run.errors
    else:
        assert (run.status, run.output) == (0, "8\n"), run.errors


@needs_compiler
def test_a_triton_kernel_is_refused_by_name(sim_process, tmp_path):
    code = """
        import torch
        import triton
        import triton.language as tl

        @triton.jit
        def double(pointer, size: tl.constexpr):
            place = pointer + tl.arange(0, size)
            tl.store(place, tl.load(place) * 2)

        double[(1,)](torch.ones(8, device="cuda"), 8)
    """
    run = sim_process.run_code(code, TRITON_CACHE_DIR=str(tmp_path))
    assert run.status == 1, run.output
    (line,) = refusals(run)
    assert MADE_FOR_RUN_TIME in line
