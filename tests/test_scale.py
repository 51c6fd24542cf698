"""The simulator of an iteration, its page, and a real run of 1,024 samples whose memory is bounded.

Covers ``benchmarks/scale/``.
"""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks are no part of the installed package

from benchmarks.scale import parallelism
from benchmarks.scale.calibration import errors, fit
from benchmarks.scale.cells import LENGTHS, MODELS, SERIAL_LIMIT, cell
from benchmarks.scale.measure import summarize
from benchmarks.scale.page import PAGE, load, page
from benchmarks.scale.rank import run
from benchmarks.scale.simulator import Workload, cost, predict
from benchmarks.scale.sizes import SMALL


def work(ranks: int, answer_tokens: float = 1000.0) -> Workload:
    """Of 1,024 sequences."""
    longest = 100 + 2 * answer_tokens
    return Workload(
        sequences=1024, group_size=8, prompt_tokens=100, answer_tokens=answer_tokens, longest=longest, ranks=ranks
    )


def test_constants_are_found_again_from_exact_measurements() -> None:
    works = [work(1), work(2), work(4, 200.0), work(6, 50.0)]
    true = {"own token": 3e-8, "sequence": 2e-6, "rank": 0.0}
    found = fit(works, [cost(true, each) for each in works], list(true))
    assert found == {name: pytest.approx(value, rel=1e-6, abs=1e-12) for name, value in true.items()}


def test_a_rank_of_twice_as_many_has_half_the_tokens_and_all_the_sequences() -> None:
    constants = {"stack": {"own token": 1e-7}, "plan": {"sequence": 1e-5}, "resident": {"own token": 40.0}}
    few, many = predict(constants, work(4)), predict(constants, work(8))
    assert many.seconds["stack"] == few.seconds["stack"] / 2
    assert many.seconds["plan"] == few.seconds["plan"]
    assert many.resident == few.resident / 2


def test_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(load()), "run python -m benchmarks.scale page"


def test_the_table_of_the_strategy_page_is_what_the_script_writes() -> None:
    text = parallelism.PAGE.read_text(encoding="utf-8")
    assert parallelism.BEGIN in text
    assert text == parallelism.page(text), "run python -m benchmarks.scale parallelism"


def test_forward_groups_are_as_small_as_rows_allow() -> None:
    """Numbers that the page's advice rests on: a row of 32k tokens at 70B needs two ranks, one of 8k none."""
    alone, two, eight = (parallelism.line("70B", 64, tokens) for tokens in (8192, 32768, 131072))
    column = parallelism.HEAD.index("sequence ranks")
    assert [line[column] for line in (alone, two, eight)] == ["1", "2", "8"]
    ulysses, tensor = (float(eight[column + add].rstrip("%")) for add in (2, 4))
    assert ulysses < tensor


def test_runs_of_1_2_4_and_6_ranks_were_predicted_within_a_quarter() -> None:
    measured = load()
    ratios = errors(measured["constants"], measured["checks"], apart=("engine",))
    assert {ratio["ranks"] for ratio in ratios} == {1, 2, 4, 6}
    for ratio in ratios:
        assert all(0.75 <= ratio[name] <= 1.25 for name in ratio if name not in ("ranks", "peak")), ratio
        assert 0.65 <= ratio["peak"] <= 1.35, ratio  # equal runs gave 65, 78 and 100 B a token: the allocator's reuse


def test_serial_work_at_64_ranks_is_within_its_bound() -> None:
    measured = load()
    cells = [cell(128, model, tokens, measured) for model in MODELS for tokens in LENGTHS]
    shares = {(each.model, each.tokens): each.serial_share for each in cells if math.isfinite(each.collecting)}
    assert {key: share for key, share in shares.items() if share > SERIAL_LIMIT} == {}


@pytest.mark.distributed
def test_a_rank_holds_its_own_rows_and_sends_them_once() -> None:
    size, ranks = SMALL
    found = summarize(size, run(size, ranks, timeout=200))
    own_tokens = size.sequences * (size.prompt_tokens + found["answer_tokens"]) / ranks
    assert found["longest"] > 3 * own_tokens * ranks / size.sequences  # padded rows would take 80 B per own token
    # 8 MiB: pages of small objects that the allocator keeps.
    assert found["resident"] <= 40 * own_tokens + 200 * size.sequences + 8 * 2**20
    assert 0 < found["sent"] <= 20 * own_tokens
