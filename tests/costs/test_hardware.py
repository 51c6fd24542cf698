"""The table of GPUs, and what is refused."""

import pytest

from rlhfkit.costs import GPU, GPUS, Efficiency, find_gpu


def test_a_gpu_is_found_by_its_name_in_any_case() -> None:
    assert find_gpu("h100") is GPUS["H100"]
    assert find_gpu(GPUS["B200"]) is GPUS["B200"]


def test_an_unknown_gpu_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"must be one of A100-40GB, A100, H100, .* got 'H1000'; for another one"):
        find_gpu("H1000")


def test_every_gpu_states_its_source_and_plausible_numbers() -> None:
    for gpu in GPUS.values():
        assert gpu.source
        assert 30e9 < gpu.memory < 300e9
        assert 100 < gpu.flops / gpu.bandwidth < 500  # operations per byte of all these generations
        assert gpu.link < gpu.bandwidth


@pytest.mark.parametrize("field", ["memory", "flops", "bandwidth", "link", "network"])
def test_numbers_of_a_gpu_are_checked(field: str) -> None:
    numbers = {"memory": 1.0, "flops": 1.0, "bandwidth": 1.0, "link": 1.0, "network": 1.0} | {field: 0.0}
    with pytest.raises(ValueError, match=f"GPU.{field} must be a finite number above 0"):
        GPU(name="mine", **numbers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_flops": 1.5}, "Efficiency.train_flops must be a finite number above 0 and at most 1, got 1.5"),
        ({"decode_step": -1.0}, "Efficiency.decode_step must be a finite number of at least 0, got -1.0"),
    ],
)
def test_shares_are_checked(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Efficiency(**arguments)
