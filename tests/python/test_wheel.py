import importlib.metadata
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT, python


def test_one_wheel_serves_every_python(wheel):
    assert wheel.name.startswith("torch_residency-")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")


def test_holds_libraries_headers_and_cmake_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "lib/libresidency_core.so",
        "lib/libresidency_aten.so",
        "lib/cmake/residency/residency-config.cmake",
        "lib/cmake/residency/FindResidencyTorch.cmake",
        "include/residency/core/export.h",
        "py.typed",
        "sim/_children/torch_residency_sim.dist-info/entry_points.txt",
        "sim/_children/torch_residency_sim.dist-info/METADATA",
    ):
        assert f"torch_residency/{name}" in names


def test_pins_the_torch_minor_version_it_was_built_for(wheel):
    # Of the wheel, and not of the entry point of the simulator's child processes.
    top = (n for n in zipfile.ZipFile(wheel).namelist() if n.count("/") == 1)
    (metadata,) = (n for n in top if n.endswith(".dist-info/METADATA"))
    minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert f"Requires-Dist: torch=={minor}.*" in text.splitlines()


@pytest.mark.parametrize("name", ["core", "aten"])
def test_libraries_need_neither_python_nor_packages_of_the_build_machine(site_packages, name):
    library = site_packages / f"torch_residency/lib/libresidency_{name}.so"
    dynamic = subprocess.run(
        ["readelf", "-d", library], check=True, text=True, capture_output=True
    ).stdout
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    system = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
    own = {"libresidency_core.so", "libtorch_cpu.so", "libc10.so"} if name == "aten" else set()
    assert needed <= system | own
    # Nor a folder of it.
    assert str(ROOT) not in dynamic
    assert sys.prefix not in dynamic


def test_the_simulated_runtime_is_where_no_loader_looks(site_packages):
    package = site_packages / "torch_residency"
    names = {file.name for file in (package / "_sim").iterdir()}
    assert names == {
        "libcudart.so.13",
        "libcuda.so.1",
        "libnvidia-ml.so.1",
        "libcupti.so.13",
        "libresidency_simcuda_operators.so",
    }
    for library in (package / "lib").glob("*.so"):
        dynamic = subprocess.run(
            ["readelf", "-d", library], check=True, text=True, capture_output=True
        ).stdout
        assert "_sim" not in dynamic


def test_torch_does_not_hear_of_the_simulated_card_unless_asked(site_packages):
    found = importlib.metadata.distributions(path=[str(site_packages)])
    groups = {entry.group for distribution in found for entry in distribution.entry_points}
    assert "torch.backends" not in groups


def test_an_isolated_build_stops_with_the_remedy(tmp_path):
    build = python("-m", "pip", "wheel", "--no-deps", "-w", tmp_path, ROOT, check=False)
    assert build.returncode != 0
    assert "install torch there and build with --no-build-isolation." in build.stdout + build.stderr


@pytest.mark.parametrize("component", ["core", "aten", "cuda"])
def test_another_project_builds_against_the_installed_package(
    run_python, site_packages, tmp_path, component
):
    prefix = run_python("import torch_residency as r; print(r.cmake_prefix_path)").stdout.strip()
    assert prefix == str(site_packages / "torch_residency")
    consumer = subprocess.run(
        ["cmake", f"-DPREFIX={prefix}", f"-DWORK_DIR={tmp_path}/build",
         f"-DCOMPONENTS={component}", "-P", ROOT / "tests/consumer/build_and_run.cmake"],
        text=True, capture_output=True,
    )  # fmt: skip
    assert consumer.returncode == 0, consumer.stdout + consumer.stderr
