"""What ``CUDA_VISIBLE_DEVICES`` means, as torch reads it, and what the driver is asked."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from simulated_driver import simulated_driver, simulated_uuid

from rlhfkit.gpus import (
    VARIABLE,
    DriverReport,
    ask_driver,
    name_of_uuid,
    uuid_of_name,
    visible_devices_problem,
    visible_names,
)

MANY = 1000  # torch does not know how many there are when it reads the variable
ENTRIES = st.sampled_from(["0", "1", "2", "-1", "", "x", "+1", "1gpu2", f"GPU-{simulated_uuid(0)}", "GPU-8f", "MIG-3e"])


@given(st.lists(ENTRIES, min_size=1, max_size=5))
def test_the_variable_means_what_it_means_to_torch(entries: list[str]) -> None:
    value = ",".join(entries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, value)
        cuda: Any = torch.cuda
        theirs = cuda._parse_visible_devices()
    ours = visible_names(value, MANY)
    numbers = [name if "-" in name else int(name.lstrip("+")[:1]) for name in ours]
    assert numbers == theirs


def test_numbers_of_gpus_that_are_not_there_end_the_list() -> None:
    """CUDA C++ Programming Guide: only devices before the first invalid index are visible."""
    assert visible_names("1,7,0", 4) == ["1"]
    assert visible_names(None, 3) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, None),
        ("0,1", None),
        (f"GPU-{simulated_uuid(1)}", None),
        ("", "CUDA_VISIBLE_DEVICES='' hides all 4 GPU(s)"),
        ("-1", "CUDA_VISIBLE_DEVICES='-1' hides all 4 GPU(s)"),
        ("1,0,1", "names 1 twice, for which CUDA hides all GPUs"),
        ("0,4", "'4' is none of this machine's 4 GPU(s) (numbers from 0, or UUIDs"),
        ("0,GPU-8f", "'GPU-8f' is none of this machine's 4 GPU(s)"),
        ("two", "'two' is none of this machine's 4 GPU(s)"),
        ("0,,1", "CUDA shows the 1 before it only"),
    ],
)
def test_what_is_odd_about_the_variable_is_said(value: str | None, says: str | None) -> None:
    found = visible_devices_problem(value, 4)
    assert found is None if says is None else found is not None and says in found


def test_a_uuid_and_its_name_in_the_variable_say_the_same() -> None:
    uuid = simulated_uuid(3)
    assert uuid_of_name(name_of_uuid(uuid)) == uuid
    assert name_of_uuid(uuid, "NVIDIA A100-SXM4-40GB MIG 1g.5gb") == f"MIG-{uuid}"
    assert uuid_of_name("3") is None
    assert uuid_of_name("GPU-8f") is None  # CUDA takes the beginning of a UUID too
    assert uuid_of_name(None) is None


def test_without_a_driver_the_report_is_empty() -> None:
    """As on this machine, unless it has one."""
    found = ask_driver({"PATH": os.environ["PATH"]})
    assert found == DriverReport() or found.cuda is not None


def test_the_driver_tells_what_a_process_with_that_environment_sees(tmp_path: Path) -> None:
    driver = simulated_driver(tmp_path, 4)
    found = ask_driver(driver)
    assert [gpu.uuid for gpu in found.gpus] == [simulated_uuid(gpu) for gpu in range(4)]
    assert (found.cuda, found.error) == ((13, 0), None)
    assert (found.gpus[2].name, found.gpus[2].capability) == ("Simulated 2", (9, 0))
    assert found.gpus[2].memory == 80 * 2**30
    chosen = ask_driver(driver | {VARIABLE: f"3,GPU-{simulated_uuid(1)}"})
    assert [gpu.name for gpu in chosen.gpus] == ["Simulated 3", "Simulated 1"]
    assert ask_driver(driver | {VARIABLE: ""}).gpus == ()
    old = ask_driver(driver | {"SIMULATED_CUDA": "12020", "SIMULATED_ERROR": "803"})
    assert (old.cuda, old.error) == ((12, 2), 803)


def test_it_loads_neither_torch_nor_anything_else() -> None:
    code = "import sys; import rlhfkit.gpus; print([n for n in ('torch', 'ray', 'lightning') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_driver_and_torch_describe_the_same_gpus() -> None:
    found = ask_driver().gpus
    assert len(found) == torch.cuda.device_count()
    for index, gpu in enumerate(found):
        theirs: Any = torch.cuda.get_device_properties(index)
        assert gpu.uuid == str(theirs.uuid)
        assert (gpu.name, gpu.capability) == (theirs.name, (theirs.major, theirs.minor))
        assert gpu.memory == pytest.approx(theirs.total_memory, rel=0.02)
