"""Several simulated cards: which of them a process sees, and what goes between them."""

import pytest


@pytest.mark.parametrize(
    "call",
    [
        "torch.cuda.comm.reduce_add([a, b])",
        "torch.nn.DataParallel(torch.nn.Linear(8, 8).cuda())(a)",
        "torch.distributed.init_process_group("
        "'nccl', rank=0, world_size=1, store=torch.distributed.HashStore()); "
        "torch.distributed.all_reduce(a)",
    ],
    ids=["reduce_add", "DataParallel", "all_reduce"],
)
def test_nccl_is_refused_by_name(sim_process, call):
    code = f"""
        import torch, torch.cuda.comm
        a, b = (torch.ones(8, 8, device=f"cuda:{{i}}") for i in range(2))
        {call}
    """
    run = sim_process.run_code(code, "--devices=2")
    assert run.status == 1, run.output
    assert [line for line in run.errors.splitlines() if line.startswith("simcuda: ")] == [
        "simcuda: cuGetProcAddress is not simulated: a library with CUDA's own runtime linked into "
        "it, as NCCL, cannot use the simulated card (torch.distributed can with gloo)"
    ]
