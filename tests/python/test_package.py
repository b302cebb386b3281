import re
import shutil
from pathlib import Path

from conftest import ROOT


def test_import_is_light(run_python):
    run = run_python(
        "import torch_residency; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert run.stdout.split() == ["False", "False"], run.stderr


def test_version_is_that_of_the_metadata_and_of_cmake(run_python, site_packages):
    version = run_python("import torch_residency as r; print(r.__version__)").stdout.strip()
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert (site_packages / f"torch_residency-{version}.dist-info").is_dir()
    package = site_packages / "torch_residency"
    config = package / "lib/cmake/residency/residency-config-version.cmake"
    assert f'set(PACKAGE_VERSION "{version}")' in config.read_text()


def test_is_marked_as_typed(site_packages):
    assert (site_packages / "torch_residency/py.typed").exists()


def test_libraries_load_beside_torch(run_python):
    # Before torch was imported by anyone, so that the libraries' own search path must find it.
    run = run_python(
        "import ctypes, torch_residency as r; "
        "ctypes.CDLL(r.cmake_prefix_path + '/lib/libresidency_aten.so'); "
        "r.load_libraries(); r.load_libraries(); print('loaded')"
    )
    assert run.stdout.strip() == "loaded", run.stderr


def test_another_torch_is_refused_with_the_remedy(run_python, site_packages, tmp_path):
    package = Path(shutil.copytree(site_packages / "torch_residency", tmp_path / "torch_residency"))
    (package / "_built.py").write_text('TORCH_VERSION = "2.3.1"\n')
    run = run_python("import torch_residency; torch_residency.load_libraries()", tmp_path)
    last_line = run.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError: torch_residency was built for torch 2.3 and this is")
    assert "--no-build-isolation" in last_line


def test_source_tree_says_that_it_has_no_libraries(run_python):
    run = run_python("import torch_residency; torch_residency.load_libraries()", ROOT / "torch_ops")
    assert "ImportError: torch_residency has no native libraries here" in run.stderr
