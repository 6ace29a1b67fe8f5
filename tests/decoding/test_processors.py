"""Logits processors on ragged positions give what they give when `generate` calls them, step by step, for the batch."""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from layerskip.decoding.processors import BY_INDEX, OWN_IDS, REFUSED, SCORES_ONLY, Processors
from layerskip.decoding.state import state_of
from layerskip.decoding.transcript import Transcript
from tests.kit import word_tokenizer

VOCAB = 50
PAD = 49
STEPS = 6
WIDTH = 4
LEFT = torch.tensor([[PAD, PAD, 1, 2], [5, 6, 7, 8], [PAD, 3, 4, 3], [9, 9, 9, 9]])
RIGHT = torch.tensor([[1, 2, PAD, PAD], [5, 6, 7, 8], [3, 4, 3, PAD], [9, 9, 9, 9]])
# Few different ones, so that n-grams and sequences recur.
TOKENS = torch.tensor([[1, 2, 1, 2, 1, 2], [7, 8, 5, 6, 7, 8], [3, 4, 3, 4, 3, 3], [9, 1, 9, 1, 9, 9]])
# Several counts a row, rows out of order, one place twice.
ROWS = [2, 0, 0, 1, 3, 2, 2, 1, 0, 0]
COUNTS = [0, 2, 3, 5, 1, 5, 4, 0, 5, 5]


def step_scores() -> torch.Tensor:
    """Returns the scores of every step, `(steps, rows, vocabulary)`."""
    return torch.randn(STEPS, len(LEFT), VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def transcript_of(prompts: torch.Tensor) -> Transcript:
    transcript = Transcript(prompts, STEPS, PAD)
    for row, tokens in enumerate(TOKENS.tolist()):
        transcript.write(row, 0, tokens)
    return transcript


def as_generate(make: Callable[[], list[Any]], prompts: torch.Tensor) -> torch.Tensor:
    """Returns what the processors give step by step, called for the whole batch, with ids of one length."""
    ids = torch.cat([prompts, TOKENS], dim=1)
    processors = LogitsProcessorList(make())
    steps = enumerate(step_scores())
    return torch.stack([processors(ids[:, : WIDTH + step], scores.clone()) for step, scores in steps])


def ragged(processors: Sequence[Any], prompts: torch.Tensor = LEFT) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `Processors` makes of the entries of ROWS and COUNTS."""
    return Processors(processors, transcript_of(prompts))(step_scores()[COUNTS, ROWS], ROWS, COUNTS)


def prefix_rule(batch: int, ids: torch.Tensor) -> list[int]:
    """Another rule for every row, which reads the ids."""
    return [batch, 10 + batch, (int(ids[-1]) + int(ids.sum())) % 40]


class ByIndex(LogitsProcessor):
    """Depends on the row's place and on its ids, and writes in place."""

    def __init__(self) -> None:
        self.tokenizer = word_tokenizer()
        self.module = torch.nn.Linear(2, 2)
        self.table = torch.arange(float(VOCAB))
        self.array = np.arange(3)
        self.nested = {"allowed": [1, 2, (3, {4})], "nan": float("nan")}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = torch.arange(len(scores)).unsqueeze(1)
        scores += self.table * place + input_ids.sum(1, keepdim=True)
        scores[place[:, 0], place[:, 0]] = -torch.inf
        return scores


ENCODER = torch.tensor([[1, 2, 3], [7, 8, 5], [3, 4, 3], [9, 1, 2]])
WHISPER = SimpleNamespace(no_timestamps_token_id=30, eos_token_id=2, bos_token_id=0, max_initial_timestamp_index=3)

SUPPORTED: dict[str, Callable[[], list[Any]]] = {
    "temperature": lambda: [hf.TemperatureLogitsWarper(0.7)],
    "top_k": lambda: [hf.TopKLogitsWarper(5)],
    "top_p": lambda: [hf.TopPLogitsWarper(0.8)],
    "top_h": lambda: [hf.TopHLogitsWarper(0.5)],
    "min_p": lambda: [hf.MinPLogitsWarper(0.1)],
    "typical": lambda: [hf.TypicalLogitsWarper(0.8)],
    "epsilon": lambda: [hf.EpsilonLogitsWarper(0.01)],
    "eta": lambda: [hf.EtaLogitsWarper(0.1)],
    "remove_invalid": lambda: [hf.SuppressTokensLogitsProcessor([3]), hf.InfNanRemoveLogitsProcessor()],
    "normalise": lambda: [hf.LogitNormalization()],
    "suppress": lambda: [hf.SuppressTokensLogitsProcessor([1, 7])],
    "repetition": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.5)],
    "repetition_behind_prompt": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.5, WIDTH)],
    "repetition_per_row": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor([2, 0, 1, 6]))],
    "no_repeat_ngram": lambda: [hf.NoRepeatNGramLogitsProcessor(2)],
    "bad_words": lambda: [hf.NoBadWordsLogitsProcessor([[1], [3, 4], [7, 8, 5]])],
    "bias_of_tokens": lambda: [hf.SequenceBiasLogitsProcessor({(1,): 4.0, (2,): -torch.inf})],
    "bias_of_sequences": lambda: [hf.SequenceBiasLogitsProcessor({(1, 2): 4.0, (3, 4, 3): -2.5, (9, 1): 1.0})],
    "min_length": lambda: [hf.MinLengthLogitsProcessor(WIDTH + 3, [2, 5])],
    "min_new_tokens": lambda: [hf.MinNewTokensLengthLogitsProcessor(WIDTH, 3, [2, 5])],
    "forced_eos": lambda: [hf.ForcedEOSTokenLogitsProcessor(WIDTH + STEPS, [2])],
    "decay": lambda: [hf.ExponentialDecayLengthPenalty((1, 1.3), 2, WIDTH)],
    "begin_suppress": lambda: [hf.SuppressTokensAtBeginLogitsProcessor([1, 4], WIDTH)],
    "watermark": lambda: [hf.WatermarkLogitsProcessor(VOCAB, "cpu")],
    "watermark_selfhash": lambda: [
        hf.WatermarkLogitsProcessor(VOCAB, "cpu", seeding_scheme="selfhash", context_width=2)
    ],
    "prefix": lambda: [hf.PrefixConstrainedLogitsProcessor(prefix_rule, 1)],
    "prefix_of_two_sequences": lambda: [hf.PrefixConstrainedLogitsProcessor(prefix_rule, 2)],
    "encoder_repetition": lambda: [hf.EncoderRepetitionPenaltyLogitsProcessor(1.5, ENCODER)],
    "encoder_repetition_of_two_sequences": lambda: [hf.EncoderRepetitionPenaltyLogitsProcessor(1.5, ENCODER[:2])],
    "encoder_ngram": lambda: [hf.EncoderNoRepeatNGramLogitsProcessor(2, ENCODER)],
    "encoder_ngram_of_two_sequences": lambda: [hf.EncoderNoRepeatNGramLogitsProcessor(2, ENCODER[:2])],
    "codebooks": lambda: [hf.AlternatingCodebooksLogitsProcessor(WIDTH, 10, 15)],
    "bark": lambda: [hf.BarkEosPrioritizerLogitsProcessor(2, 0.002)],
    "dia_channels": lambda: [hf.DiaEOSChannelFilterLogitsProcessor(2, 5)],
    "whisper": lambda: [hf.WhisperTimeStampLogitsProcessor(WHISPER, WIDTH, True)],
    "own": lambda: [ByIndex()],
    "own_function": lambda: [lambda ids, scores: scores * (1 + ids[:, -1:]) + torch.arange(len(ids)).unsqueeze(1)],
    "chain": lambda: [
        hf.RepetitionPenaltyLogitsProcessor(1.5),
        hf.NoRepeatNGramLogitsProcessor(2),
        ByIndex(),
        hf.PrefixConstrainedLogitsProcessor(lambda batch, ids: list(range(batch, 40)), 1),
        hf.ExponentialDecayLengthPenalty((1, 1.3), 2, WIDTH),
        hf.TemperatureLogitsWarper(0.7),
        hf.EtaLogitsWarper(0.01),
        hf.LogitNormalization(),
    ],
}


@pytest.mark.parametrize("prompts", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_entries_get_what_generate_gives_them(name: str, prompts: torch.Tensor) -> None:
    expected = as_generate(SUPPORTED[name], prompts)[COUNTS, ROWS]
    processed, alive = ragged(SUPPORTED[name](), prompts)
    torch.testing.assert_close(processed, expected, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(processed, step_scores()[COUNTS, ROWS]), "the processor must have something to do"
    assert alive.tolist() == (expected > -torch.inf).any(1).tolist()


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_place_alone_gives_the_same(name: str) -> None:
    expected = as_generate(SUPPORTED[name], LEFT)
    processors = Processors(SUPPORTED[name](), transcript_of(LEFT))
    for row, count in zip(ROWS, COUNTS, strict=True):
        processed, _ = processors(step_scores()[count, row : row + 1], [row], [count])
        torch.testing.assert_close(processed[0], expected[count, row], rtol=0, atol=0, equal_nan=True)


def test_a_bos_token_is_forced_where_the_ids_hold_one_token() -> None:
    transcript = Transcript(torch.empty(2, 0, dtype=torch.int64), STEPS, PAD)
    scores = step_scores()[0, :3]
    processed, _ = Processors([hf.ForcedBOSTokenLogitsProcessor(5)], transcript)(scores, [0, 1, 1], [0, 1, 2])
    assert torch.equal(processed[[0, 2]], scores[[0, 2]])
    assert processed[1].isfinite().nonzero().tolist() == [[5]]


def test_every_supported_type_is_compared_above() -> None:
    compared = {type(processor) for make in SUPPORTED.values() for processor in make()}
    assert (SCORES_ONLY | OWN_IDS | BY_INDEX) - compared == {hf.ForcedBOSTokenLogitsProcessor}


def test_every_processor_of_transformers_is_in_exactly_one_group() -> None:
    theirs = {
        value
        for value in vars(hf).values()
        if inspect.isclass(value) and issubclass(value, LogitsProcessor) and value is not LogitsProcessor
    }
    groups = (SCORES_ONLY, OWN_IDS, BY_INDEX, REFUSED)
    assert {kind.__name__ for kind in theirs ^ frozenset().union(*groups)} == set()
    assert sum(map(len, groups)) == len(theirs)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_list_is_used_twice_and_the_callers_scores_stay(name: str) -> None:
    processors = SUPPORTED[name]()
    scores = step_scores()[COUNTS, ROWS]
    given = scores.clone()
    results = [Processors(processors, transcript_of(LEFT))(scores, ROWS, COUNTS)[0] for _ in range(2)]
    assert torch.equal(scores, given)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)


def test_processors_are_applied_in_their_order() -> None:
    penalty, temperature = hf.ExponentialDecayLengthPenalty((0, 1.5), 2, WIDTH), lambda ids, scores: scores - 5
    one, other = ragged([penalty, temperature])[0], ragged([temperature, penalty])[0]
    assert not torch.equal(one, other)
    expected = as_generate(lambda: [temperature, penalty], LEFT)[COUNTS, ROWS]
    assert torch.equal(other, expected)


def test_no_processors_leave_scores_alone() -> None:
    none = Processors([], transcript_of(LEFT))
    processed, alive = none(step_scores()[0], [0, 1, 2, 3], [0] * 4)
    assert torch.equal(processed, step_scores()[0])
    assert alive.tolist() == [True] * 4


def test_nothing_behind_a_place_is_shown() -> None:
    seen = []

    def own(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.shape[0] == len(LEFT) == scores.shape[0]
        seen.append(ids.shape[1] - WIDTH)
        return scores

    processors = Processors([own], transcript_of(LEFT))
    # The list that this test reads is state, so that the first call is refused.
    with pytest.raises(ValueError, match=r"the function .*own, which changed when it was called: seen"):
        processors(step_scores()[0, :1], [1], [3])
    processors(step_scores()[COUNTS, ROWS], ROWS, COUNTS)
    # One call for each count, and a second one for the place that occurs twice.
    assert sorted(seen[1:]) == [0, 1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize("beams", [1, 2])
def test_the_prefix_function_is_asked_once_for_each_entry(beams: int) -> None:
    asked = []

    def rule(batch: int, ids: torch.Tensor) -> list[int]:
        asked.append((batch, ids.tolist()))
        return [1]

    ragged([hf.PrefixConstrainedLogitsProcessor(rule, beams)])
    full = torch.cat([LEFT, TOKENS], dim=1)
    pairs = zip(ROWS, COUNTS, strict=True)
    assert asked == [(row // beams, full[row, : WIDTH + count].tolist()) for row, count in pairs]


def test_a_prefix_function_that_allows_nothing_is_an_error_only_where_a_token_is_emitted() -> None:
    transcript = transcript_of(LEFT)
    rule = hf.PrefixConstrainedLogitsProcessor(lambda batch, ids: [] if int(ids[-1]) == 2 else [1], 1)
    processors = Processors([rule, hf.InfNanRemoveLogitsProcessor()], transcript)
    processors(step_scores()[:2, 0], [0, 0], [1, 2])
    processors.require(0, 1)
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn returned no tokens for row 0 after 2"):
        processors.require(0, 2)
    transcript.write(0, 1, [3])
    processors(step_scores()[:1, 0], [0], [2])
    processors.require(0, 2)


def test_dead_entries_are_told_and_stop_no_later_processor() -> None:
    def ban(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(ids[:, -1:] == 1, -torch.inf)

    later = [hf.EtaLogitsWarper(0.01), hf.TopHLogitsWarper(0.5), hf.TemperatureLogitsWarper(0.5)]
    scores = step_scores()[COUNTS, ROWS]
    scores[0] = torch.nan
    processed, alive = Processors([ban, *later], transcript_of(LEFT))(scores, ROWS, COUNTS)
    full = torch.cat([LEFT, TOKENS], dim=1)
    last = [int(full[row, WIDTH + count - 1]) for row, count in zip(ROWS, COUNTS, strict=True)]
    expected = [entry > 0 and token != 1 for entry, token in enumerate(last)]
    assert 1 < sum(expected) < len(expected) - 1
    assert alive.tolist() == expected
    # What `generate` would choose from there, and not what came before.
    assert (processed[~alive][1:] == -torch.inf).all()
    reference = ragged([*later])[0]
    assert torch.equal(processed[alive], reference[alive])


def test_a_later_processor_can_bring_an_entry_back() -> None:
    dead = hf.SuppressTokensLogitsProcessor(range(VOCAB))
    processed, alive = ragged([dead, hf.EtaLogitsWarper(0.01), hf.ForcedEOSTokenLogitsProcessor(WIDTH + 6, 2)])
    assert alive.tolist() == [count == 5 for count in COUNTS]
    assert (processed[alive].argmax(1) == 2).all()


class Counts(LogitsProcessor):
    """Stands for processors that remember: `change` says how."""

    shared: list[int] = []  # noqa: RUF012 — a list of the class is one of the ways to remember.

    def __init__(self, change: Callable[[Any], object]) -> None:
        self.change = change
        self.value: Any = 0
        self.items: Any = [1, 2]
        self.tensor = torch.zeros(3)
        self.array = np.zeros(3)
        self.nested = SimpleNamespace(deep=SimpleNamespace(table={"a": [0]}))
        self.recent: deque[int] = deque([1, 2, 3], maxlen=3)
        self.random = random.Random(0)
        self.generator = torch.Generator()
        self.numpy = np.random.default_rng(0)
        with torch.inference_mode():
            self.inference = torch.zeros(3)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return scores


def write_in_inference_mode(counts: Counts) -> None:
    with torch.inference_mode():
        counts.inference += 1


CHANGES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "counter": ("value", lambda own: setattr(own, "value", own.value + 1)),
    "kind of number": ("value", lambda own: setattr(own, "value", False)),
    "list": ("items", lambda own: own.items.append(3)),
    "entry": ("items", lambda own: own.items.__setitem__(0, 5)),
    "dict": ("nested", lambda own: own.nested.deep.table.__setitem__("b", 1)),
    "nested": ("nested", lambda own: setattr(own.nested.deep, "new", 1)),
    "deep list": ("nested", lambda own: own.nested.deep.table["a"].append(1)),
    "tensor": ("tensor", lambda own: own.tensor.add_(1)),
    "new tensor": ("tensor", lambda own: setattr(own, "tensor", own.tensor + 1)),
    "inference tensor": ("inference", write_in_inference_mode),
    "array": ("array", lambda own: own.array.__setitem__(0, 1)),
    "deque": ("recent", lambda own: own.recent.append(4)),
    "random": ("random", lambda own: own.random.random()),
    "generator": ("generator", lambda own: torch.rand(1, generator=own.generator)),
    "numpy generator": ("numpy", lambda own: own.numpy.random()),
    "new attribute": ("late", lambda own: setattr(own, "late", 1)),
    "class attribute": ("shared", lambda own: own.shared.append(1)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_processor_that_remembers_is_refused_at_its_first_call(name: str, inference: bool) -> None:
    attribute, change = CHANGES[name]
    processors = Processors([hf.TemperatureLogitsWarper(0.5), Counts(change)], transcript_of(LEFT))
    with (
        torch.inference_mode(inference),
        pytest.raises(ValueError, match=rf"holds Counts, which changed when it was called: {attribute}\. .*rejected"),
    ):
        processors(step_scores()[0], [0, 1, 2, 3], [0] * 4)


class Slots:
    """A processor of no base, without a dictionary."""

    __slots__ = ("calls", "never_set")

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores

    def method(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self(input_ids, scores)


class OwnPenalty(hf.RepetitionPenaltyLogitsProcessor):
    """A subclass is the caller's own."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.penalty *= 1.5
        return super().__call__(input_ids, scores)


def test_slots_methods_closures_and_subclasses_are_looked_at_too() -> None:
    calls = 0

    def counting(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return scores

    for processor, attribute in (
        (Slots(), "calls"),
        (Slots().method, "calls"),
        (counting, "calls"),
        (OwnPenalty(1.5), "penalty"),
    ):
        with pytest.raises(ValueError, match=f"which changed when it was called: {attribute}"):
            ragged([processor])


def test_what_stays_equal_is_no_change() -> None:
    def unchanged(own: Any) -> None:
        own.value = 0
        own.items = list(own.items)
        own.tensor = own.tensor.clone()
        own.array.copy()
        own.nested.deep.table = dict(own.nested.deep.table)

    processed, _ = ragged([Counts(unchanged)])
    assert torch.equal(processed, step_scores()[COUNTS, ROWS])


def test_only_the_first_call_is_watched() -> None:
    own = Counts(lambda own: None)
    processors = Processors([own], transcript_of(LEFT))
    processors(step_scores()[0], [0, 1, 2, 3], [0] * 4)
    own.change = lambda own: own.items.append(1)
    processors(step_scores()[0], [0, 1, 2, 3], [0] * 4)
    assert len(own.items) == 3


def test_a_structure_that_holds_itself_or_is_large_has_a_state() -> None:
    own = Counts(lambda own: None)
    own.items.append(own.items)
    own.value = {place: [place] for place in range(50_000)}
    before = state_of(own)
    assert before == state_of(own)
    assert sum(map(len, before.values())) == 5_000
    own.value[50_000] = []
    assert before["value"] != state_of(own)["value"]


@pytest.mark.parametrize("kind", sorted(REFUSED, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_processors_that_cannot_be_shown_drafts_are_refused_by_name_with_their_subclasses(kind: type) -> None:
    # Made without their arguments, some of which are models.
    for each in (kind, type(f"Own{kind.__name__}", (kind,), {})):
        with pytest.raises(ValueError, match=rf"holds {each.__name__}, which .* leave it .* or use the model's own"):
            Processors([each.__new__(each)], transcript_of(LEFT))


class NeedsMore(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, beam: int = 0) -> torch.Tensor:
        return scores


def test_a_processor_that_takes_more_is_refused_as_transformers_refuses_it() -> None:
    with pytest.raises(ValueError, match="required parameters"):
        LogitsProcessorList([NeedsMore()])(LEFT, step_scores()[0])
    with pytest.raises(ValueError, match="holds NeedsMore, which takes input_ids, scores, beam"):
        Processors([NeedsMore()], transcript_of(LEFT))


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="holds 3, which cannot be called"):
        Processors([3], transcript_of(LEFT))


def returns_nothing(ids: torch.Tensor, scores: torch.Tensor) -> None:
    return None


def test_a_result_that_is_no_scores_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="the function returns_nothing, which returned a NoneType"):
        ragged([returns_nothing])
    with pytest.raises(ValueError, match=r"<lambda>, which returned a tensor \(4, 49\)"):
        ragged([lambda ids, scores: scores[:, 1:]])
