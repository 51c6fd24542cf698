"""Texts of samples are decoded when they are read, and only then."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhfkit.data import Prompt, Sample, decode_together, sample_texts


class Decoder:
    """Writes token ids as decimal numbers, and remembers the batches."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []

    def __call__(self, batch: list[list[int]]) -> list[str]:
        self.batches.append(batch)
        return [" ".join(map(str, token_ids)) for token_ids in batch]


def samples() -> list[Sample]:
    return [Sample(Prompt(1, [1]), index, [index, 7], [0.0, 0.0], [0, 0], "stop") for index in range(3)]


def test_a_text_is_decoded_at_each_read_and_not_kept() -> None:
    decode, sample = Decoder(), samples()[2]
    sample.decode_with(decode)
    assert decode.batches == []
    assert (sample.text, sample.text) == ("2 7", "2 7")
    assert decode.batches == [[[2, 7]]] * 2
    sample.token_ids = [5, 7]
    assert sample.text == "5 7"
    sample.text = "own"
    assert sample.text == "own"


def test_the_first_read_of_a_batch_decodes_all_of_it_once() -> None:
    decode, batch = Decoder(), samples()
    with decode_together(batch, decode):
        assert decode.batches == []
        assert [sample.text for sample in batch] == ["0 7", "1 7", "2 7"]
        assert [sample.text for sample in batch] == ["0 7", "1 7", "2 7"]
        batch[1].text = "set"
    assert decode.batches == [[[0, 7], [1, 7], [2, 7]]]
    assert [sample.text for sample in batch] == ["0 7", "set", "2 7"]
    assert decode.batches[1:] == [[[0, 7]], [[2, 7]]]  # nothing was kept


def test_what_nobody_reads_is_not_decoded_also_if_the_block_fails() -> None:
    decode, batch = Decoder(), samples()
    with pytest.raises(RuntimeError, match="scoring"), decode_together(batch, decode):
        raise RuntimeError("scoring")
    assert decode.batches == []
    assert batch[0].text == "0 7"
    with decode_together([], decode):
        pass


def test_many_tokens_are_decoded_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_texts, "BATCH_TOKENS", 3)
    decode, batch = Decoder(), samples()
    with decode_together(batch, decode):
        assert [sample.text for sample in batch] == ["0 7", "1 7", "2 7"]
    assert decode.batches == [[[0, 7], [1, 7]], [[2, 7]]]


def test_threads_that_read_at_once_decode_once() -> None:
    decode, batch = Decoder(), samples()
    ready = threading.Barrier(3)

    def read(sample: Sample) -> str:
        ready.wait()
        return sample.text

    with decode_together(batch, decode), ThreadPoolExecutor(3) as threads:
        assert list(threads.map(read, batch)) == ["0 7", "1 7", "2 7"]
    assert len(decode.batches) == 1


def test_pickled_samples_and_copies_have_their_text() -> None:
    batch = samples()
    for sample in batch:
        sample.decode_with(lambda ids: [str(one[0]) for one in ids])  # which itself cannot be pickled
    assert [sample.text for sample in pickle.loads(pickle.dumps(batch))] == ["0", "1", "2"]
    assert "text='1'" in repr(batch[1])
