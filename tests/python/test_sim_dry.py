"""Dry mode: what the host reads of a card that stores nothing."""


def test_what_the_host_reads_is_zeros(sim_process):
    code = """
        import torch

        x = torch.ones(4, 6, device="cuda")
        pinned = torch.full((4, 6), 7.0, pin_memory=True)
        pinned.copy_(x, non_blocking=True)
        pageable = torch.full((4, 6), 7.0)
        pageable[:, ::2].copy_(x[:, ::2])
        torch.cuda.synchronize()
        print([
            x.sum().item(),
            x.cpu().abs().max().item(),
            x.t().double().to("cpu").abs().max().item(),
            x.half().cpu().abs().max().item(),
            max(x.flatten().tolist()),
            pinned.abs().max().item(),
            pageable[:, ::2].abs().max().item(),
            pageable[:, 1::2].min().item(),
            x.numpy(force=True).max().item(),
        ])
    """
    run = sim_process.run_code(code, "--dry")
    assert run.status == 0, run.errors
    assert run.output == f"{[0.0] * 7 + [7.0, 0.0]}\n"


def test_reading_a_value_costs_what_it_costs_computing(sim_process):
    code = """
        import torch
        x = torch.ones(1000, 1000, device="cuda")
        for _ in range(3):
            (x @ x).sum().item()
            (x > 2).any().item()
    """
    computing = sim_process.run_code(code).report
    dry = sim_process.run_code(code, "--dry").report
    for report in (computing, dry):
        del report["pid"], report["card"]["mode"]
    assert dry == computing
