"""The ids that processors and criteria see, row by row."""

from __future__ import annotations

import torch

from layerskip.decoding.transcript import Transcript

PAD = 90
PROMPTS = torch.tensor([[PAD, 1, 2], [3, 4, 5]])


def test_a_new_transcript_holds_the_prompts_and_padding_behind_them() -> None:
    transcript = Transcript(PROMPTS, capacity=2, pad=PAD)
    assert transcript.width == 3
    assert transcript.ids.tolist() == [[PAD, 1, 2, PAD, PAD], [3, 4, 5, PAD, PAD]]


def test_the_prompts_stay_the_callers() -> None:
    prompts = PROMPTS.clone()
    Transcript(prompts, capacity=2, pad=PAD).ids.fill_(0)
    assert torch.equal(prompts, PROMPTS)


def test_int32_prompts_become_int64() -> None:
    assert Transcript(PROMPTS.int(), capacity=1, pad=PAD).ids.dtype == torch.int64


def test_rows_are_written_each_from_its_own_start() -> None:
    transcript = Transcript(PROMPTS, capacity=4, pad=PAD)
    transcript.write(0, 0, [7])
    transcript.write(1, 0, [8, 9])
    transcript.write(1, 2, [10])
    transcript.write(0, 1, [])
    assert transcript.ids[:, 3:].tolist() == [[7, PAD, PAD, PAD], [8, 9, 10, PAD]]


def test_a_prompt_of_no_tokens_leaves_the_new_ones() -> None:
    transcript = Transcript(torch.empty(2, 0, dtype=torch.int64), capacity=3, pad=PAD)
    transcript.write(1, 0, [5, 6])
    assert transcript.width == 0
    assert transcript.view(2).tolist() == [[PAD, PAD], [5, 6]]


def test_cleared_tokens_become_padding_and_can_be_written_again() -> None:
    transcript = Transcript(PROMPTS, capacity=4, pad=PAD)
    transcript.write(0, 0, [7, 8, 9])
    transcript.write(1, 0, [6])
    transcript.clear(0, 1)
    assert transcript.ids[:, 3:].tolist() == [[7, PAD, PAD, PAD], [6, PAD, PAD, PAD]]
    transcript.write(0, 1, [10])
    transcript.clear(0, 3)
    assert transcript.ids[0, 3:].tolist() == [7, 10, PAD, PAD]


def test_clearing_touches_only_what_was_written() -> None:
    transcript = Transcript(PROMPTS, capacity=4, pad=PAD)
    transcript.write(0, 0, [7, 8])
    # A mark where nothing was written shows that clearing does not go there.
    transcript.ids[0, -1] = 1
    transcript.clear(0, 1)
    assert transcript.ids[0, 3:].tolist() == [7, PAD, PAD, 1]


def test_a_view_is_no_copy() -> None:
    transcript = Transcript(PROMPTS, capacity=4, pad=PAD)
    view = transcript.view(1)
    transcript.write(1, 0, [7])
    assert view.tolist() == [[PAD, 1, 2, PAD], [3, 4, 5, 7]]
