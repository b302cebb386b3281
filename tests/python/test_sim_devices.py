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


LOOK = """
    import os, torch
    if os.environ.get("LATE"):
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LATE"]
    before = torch.cuda.device_count()
    if before:
        torch.ones(1, device="cuda")
    buses = [torch.cuda.get_device_properties(i).pci_bus_id for i in range(before)]
    print(torch.cuda.is_available(), before, torch.cuda.device_count(), buses)
    try:
        torch.ones(1, device=f"cuda:{before}")
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""
NONE = "No CUDA GPUs are available"
BEYOND = "CUDA error: invalid device ordinal"
FIRST_UUID = "GPU-51c00000-0000-0000-0000-000000000000"
THIRD_UUID = "GPU-51c00000-0000-0000-0000-000000000002"


VISIBLE = [
    ("1", [1]),
    ("2,0", [2, 0]),
    ("0,7,1", [0]),
    ("1,-1,0", [1]),
    ("2, 1", [2, 1]),
    ("", []),
    ("-1", []),
    ("none", []),
    ("1,1", []),
    (f"{THIRD_UUID},{FIRST_UUID}", [2, 0]),
]


@pytest.mark.parametrize(
    "variable, value, cards",
    [
        (variable, value, cards)
        for variable in ("CUDA_VISIBLE_DEVICES", "LATE")
        for value, cards in VISIBLE
        if value or variable != "LATE"  # which the script would take for not set
    ],
)
def test_visible_devices_are_those_of_the_variable(sim_process, variable, value, cards):
    run = sim_process.run_code(LOOK, "--devices=3", **{variable: value})
    assert run.status == 0, run.errors
    seen, refusal = run.output.splitlines()
    buses = [card + 1 for card in cards]
    assert seen == f"{bool(cards)} {len(cards)} {len(cards)} {buses}"
    assert refusal == (BEYOND if cards else NONE)
    assert run.report["visible_devices"] == cards
    assert len(run.report["devices"]) == len(cards)
    names = ", ".join(map(str, cards)) or "none"
    assert f"CUDA_VISIBLE_DEVICES shows the script {len(cards)} of them: {names}\n" in run.errors


def test_all_devices_are_visible_without_the_variable(sim_process):
    run = sim_process.run_code(LOOK, "--devices=2")
    assert run.output.startswith("True 2 2 [1, 2]\n"), run.errors
    assert "CUDA_VISIBLE_DEVICES" not in run.errors


def test_children_see_what_the_variable_shows_them(sim_process):
    code = """
        import os, torch

        def work(rank):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
            torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
            assert torch.cuda.device_count() == 1

        if __name__ == "__main__":
            torch.multiprocessing.spawn(work, nprocs=2)
    """
    run = sim_process.run_code(code, "--devices=2")
    assert run.status == 0, run.errors
    assert sorted(child["visible_devices"] for child in run.report["children"]) == [[0], [1]]
