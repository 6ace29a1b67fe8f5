"""Logits processors where rows differ in length: every position's scores are processed as `generate` would do it."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import logits_process as hf

from layerskip.decoding.state import Watch, name_of
from layerskip.decoding.transcript import Transcript

# The four sets hold exact types: a subclass may do something else, and counts as a processor of the caller's own.

SCORES_ONLY: frozenset[type] = frozenset(
    {
        hf.EpsilonLogitsWarper,
        hf.EtaLogitsWarper,
        hf.InfNanRemoveLogitsProcessor,
        hf.LogitNormalization,
        hf.MinPLogitsWarper,
        hf.SuppressTokensLogitsProcessor,
        hf.TemperatureLogitsWarper,
        hf.TopHLogitsWarper,
        hf.TopKLogitsWarper,
        hf.TopPLogitsWarper,
        hf.TypicalLogitsWarper,
    }
)
"""They never read the ids and take each row of scores for itself, so that one call serves all positions."""

OWN_IDS: frozenset[type] = frozenset(
    {
        hf.ExponentialDecayLengthPenalty,
        hf.ForcedBOSTokenLogitsProcessor,
        hf.ForcedEOSTokenLogitsProcessor,
        hf.MinLengthLogitsProcessor,
        hf.MinNewTokensLengthLogitsProcessor,
        hf.NoBadWordsLogitsProcessor,
        hf.NoRepeatNGramLogitsProcessor,
        hf.RepetitionPenaltyLogitsProcessor,
        hf.SequenceBiasLogitsProcessor,
        hf.SuppressTokensAtBeginLogitsProcessor,
        # Seeds its generator from the row's ids at every use, so that what it was shown before makes no difference.
        hf.WatermarkLogitsProcessor,
    }
)
"""They read the ids of the row at hand alone, so that positions with ids of one length share a call."""

BY_INDEX: frozenset[type] = frozenset(
    {
        hf.EncoderNoRepeatNGramLogitsProcessor,
        hf.EncoderRepetitionPenaltyLogitsProcessor,
        hf.PrefixConstrainedLogitsProcessor,
        # Of speech models. They remember nothing, and rarity is a reason to call them as plainly as can be.
        hf.AlternatingCodebooksLogitsProcessor,
        hf.BarkEosPrioritizerLogitsProcessor,
        hf.DiaEOSChannelFilterLogitsProcessor,
        hf.WhisperTimeStampLogitsProcessor,
    }
)
"""Their result may depend on the row's place in the batch, so that each row must stand at its own index."""

REFUSED: frozenset[type] = frozenset(
    {
        # They remember the last call; drafts that are rejected later would stay in what they remember.
        hf.DiaEOSDelayPatternLogitsProcessor,
        hf.SynthIDTextWatermarkLogitsProcessor,
        hf.WhisperNoSpeechDetection,
        # They need scores of a second, unconditional sequence, which has a cache or rows of its own.
        hf.ClassifierFreeGuidanceLogitsProcessor,
        hf.DiaClassifierFreeGuidanceLogitsProcessor,
        hf.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    }
)
"""They cannot be shown drafts. Their subclasses are refused as well."""

MUST_NOT_CHANGE = (
    "It must depend on input_ids and scores alone, since it is also shown drafts that are rejected later, and what it "
    "keeps of them would be wrong. Compute this from input_ids, or set it before the call, or use the model's own "
    "generate."
)
_KNOWN = SCORES_ONLY | OWN_IDS | BY_INDEX
# `torch.distributions` raises in these where a row has no distribution.
_FAILS_ON_DEAD = frozenset({hf.EtaLogitsWarper, hf.TopHLogitsWarper})


class Processors:
    """The logits processors of one generation call, for any positions of any rows at once."""

    def __init__(self, processors: Sequence[Any], transcript: Transcript) -> None:
        """Takes processors as transformers does, applied in their order, and the ids that they are shown.

        Raises:
            TypeError: one that cannot be called.
            ValueError: one that cannot be shown drafts, or that needs more than (input_ids, scores).
        """
        for processor in processors:
            _check(processor)
        self._processors = list(processors)
        self._transcript = transcript
        # Places, row and count, where a prefix function allows nothing.
        self._unmet: set[tuple[int, int]] = set()
        # Of the caller's own nothing is known.
        self._watches = {
            place: Watch(each, "logits_processor", MUST_NOT_CHANGE)
            for place, each in enumerate(processors)
            if type(each) not in _KNOWN
        }
        self._unseen = set(self._watches)

    @property
    def device(self) -> torch.device:
        """Where scores are processed: with the ids, as `generate` does it."""
        return self._transcript.ids.device

    def __call__(
        self, scores: torch.Tensor, rows: Sequence[int], counts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns processed scores, and which of them still are a choice.

        Args:
            scores: `(n, vocabulary)` in fp32; they stay as they are.
            rows: of which row of the batch each entry is, `n` in all.
            counts: how many new tokens of its row come before each entry; they are in the transcript.

        Returns:
            The processed scores, `(n, vocabulary)`, and a bool for each entry on the scores' device, `(n,)`: false
            where all are −inf or NaN. Such an entry is no error yet, since it may stand behind a draft that is
            rejected; its scores are what the processors made of it, as in `generate`.

        Raises:
            TypeError, ValueError: what a processor returned is no tensor, or not of the scores' shape.
            ValueError: a processor of the caller's own changed when it was called for the first time.
        """
        self._unmet -= set(zip(rows, counts, strict=True))
        for place, processor in enumerate(self._processors):
            kind = type(processor)
            if kind in SCORES_ONLY:
                scores = _from_scores(processor, scores)
            elif kind is hf.PrefixConstrainedLogitsProcessor:
                scores = self._constrained(processor, scores, rows, counts)
            elif kind in OWN_IDS and not _is_per_row(processor):
                scores = self._by_count(processor, scores, rows, counts)
            else:
                scores = self._at_index(place, scores, rows, counts)
        return scores, _alive(scores)

    def check_unchanged(self) -> None:
        """Checks that no processor of the caller's own has changed since the call began.

        Raises:
            ValueError: one has, so that tokens may be wrong.
        """
        for watch in self._watches.values():
            watch.check()

    def require(self, row: int, count: int) -> None:
        """Raises where a token is emitted that no prefix function allowed, after the first `count` of its row.

        `generate` raises as it asks the function. Here the answer may be about a draft that is rejected later, so that
        this is asked of every token that is emitted; nothing is read from the device.

        Raises:
            ValueError: `prefix_allowed_tokens_fn` returned no tokens when it was last asked for this place.
        """
        if (row, count) in self._unmet:
            raise ValueError(
                f"prefix_allowed_tokens_fn returned no tokens for row {row} after {count} new ones; it must allow at "
                "least one, the end-of-sequence token where a text is complete."
            )

    def _by_count(
        self, processor: Any, scores: torch.Tensor, rows: Sequence[int], counts: Sequence[int]
    ) -> torch.Tensor:
        """Calls the processor once for every length of ids."""
        groups: dict[int, list[int]] = defaultdict(list)
        for entry, count in enumerate(counts):
            groups[count].append(entry)
        processed = torch.empty_like(scores)
        for count, entries in groups.items():
            ids = self._transcript.view(count)[_index([rows[entry] for entry in entries])]
            processed[_index(entries)] = processor(ids, scores[_index(entries)])
        return processed

    def _constrained(
        self, processor: Any, scores: torch.Tensor, rows: Sequence[int], counts: Sequence[int]
    ) -> torch.Tensor:
        """Calls the prefix function once an entry, since a call with all rows would show it ids that are none."""
        processed = torch.empty_like(scores)
        for entry, (row, count) in enumerate(zip(rows, counts, strict=True)):
            ids = self._transcript.view(count)[row]
            allowed = processor._prefix_allowed_tokens_fn(row // processor._num_beams, ids)
            if len(allowed) == 0:
                processed[entry] = -torch.inf
                self._unmet.add((row, count))
                continue
            single = hf.PrefixConstrainedLogitsProcessor(lambda *_, allowed=allowed: allowed, 1)
            processed[entry] = single(ids.unsqueeze(0), scores[entry : entry + 1])[0]
        return processed

    def _at_index(self, place: int, scores: torch.Tensor, rows: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        """Calls a processor with the whole batch, each entry at its row's index, and reads the results there."""
        seen: Counter[tuple[int, int]] = Counter()
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for entry, (row, count) in enumerate(zip(rows, counts, strict=True)):
            groups[count, seen[row, count]].append(entry)
            seen[row, count] += 1
        processed = torch.empty_like(scores)
        for (count, _), entries in groups.items():
            ids = self._transcript.view(count)
            batch = scores.new_zeros(ids.shape[0], scores.shape[1])
            own = _index([rows[entry] for entry in entries])
            batch[own] = scores[_index(entries)]
            processed[_index(entries)] = self._call(place, ids, batch)[own].to(scores.dtype)
        return processed

    def _call(self, place: int, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Calls a processor, with a look at what it remembers where it is the caller's own and called first."""
        processor = self._processors[place]
        result = processor(ids, scores)
        if place in self._unseen:
            self._unseen.remove(place)
            self._watches[place].check()
        return _checked(processor, result, scores.shape)


def _check(processor: Any) -> None:
    """Raises where a processor cannot be called with input_ids and scores alone, drafts among them."""
    if not callable(processor):
        raise TypeError(f"logits_processor holds {processor!r}, which cannot be called; pass LogitsProcessor objects.")
    if isinstance(processor, tuple(REFUSED)):
        raise ValueError(
            f"logits_processor holds {name_of(processor)}, which remembers earlier calls or needs the scores of a "
            "second sequence, and so cannot be shown drafts; leave it (or the setting that makes it) out, or use the "
            "model's own generate."
        )
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor) and not callable(processor._prefix_allowed_tokens_fn):
        raise TypeError(
            f"prefix_allowed_tokens_fn={processor._prefix_allowed_tokens_fn!r} cannot be called; pass a function of a "
            "row's index and its ids."
        )
    signature = inspect.signature(processor)
    try:
        signature.bind(None, None)
    except TypeError:
        takes_two = False
    else:
        # What transformers' LogitsProcessorList looks at: more parameters than two are passed, or missed.
        takes_two = len(inspect.signature(processor.__call__).parameters) <= 2
    if not takes_two:
        raise ValueError(
            f"logits_processor holds {name_of(processor)}, which takes {', '.join(signature.parameters)}; it is called "
            "with (input_ids, scores) alone, so give it the rest when it is made."
        )


def _checked(processor: Any, result: Any, shape: torch.Size) -> torch.Tensor:
    """Returns a processor's result if it can be scores."""
    if not isinstance(result, torch.Tensor):
        raise TypeError(
            f"logits_processor holds {name_of(processor)}, which returned a {type(result).__name__}; it must return "
            f"the processed scores, a tensor {tuple(shape)}."
        )
    if result.shape != shape:
        raise ValueError(
            f"logits_processor holds {name_of(processor)}, which returned a tensor {tuple(result.shape)}; it must "
            f"return the processed scores in their shape, {tuple(shape)}."
        )
    return result


def _is_per_row(processor: Any) -> bool:
    """Whether a repetition penalty ignores prompts of one length for each row of the batch."""
    return type(processor) is hf.RepetitionPenaltyLogitsProcessor and isinstance(
        processor.prompt_ignore_length, torch.Tensor
    )


def _from_scores(processor: Any, scores: torch.Tensor) -> torch.Tensor:
    """Applies a processor that ignores ids."""
    ids = scores.new_empty((scores.shape[0], 0), dtype=torch.int64)
    if type(processor) not in _FAILS_ON_DEAD:
        return processor(ids, scores)
    alive = _alive(scores).unsqueeze(1)
    return torch.where(alive, processor(ids, torch.where(alive, scores, 0.0)), scores)


def _alive(scores: torch.Tensor) -> torch.Tensor:
    """Returns which rows of scores hold more than −inf and NaN; nothing is read on the host."""
    return (scores > -torch.inf).any(dim=-1)


def _index(places: list[int]) -> slice | list[int]:
    """Returns consecutive places as a slice, which copies nothing, and any others as they are."""
    consecutive = list(range(places[0], places[0] + len(places)))
    return slice(places[0], places[0] + len(places)) if places == consecutive else places
