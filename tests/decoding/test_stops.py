"""Where generation ends, and what is counted there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MaxLengthCriteria, PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria

from layerskip import Engine, GenerationResult
from tests import kit

GRADED = [(family, grade) for family in ("llama", "gemma2") for grade in ("none", "some", "all")]
WIDTH = len(kit.PROMPT)


def generate(model: PreTrainedModel, **arguments: Any) -> GenerationResult:
    """Runs self-speculation at exit 2 on the usual prompt."""
    engine = Engine(model, exit_layer=kit.EXIT_LAYER)
    return engine.generate(kit.prompt_tensor(), **{"max_new_tokens": 24, "pad_token_id": 0, **arguments})


def new_tokens(result: GenerationResult) -> list[int]:
    """Returns the emitted tokens of the only row."""
    return result.sequences[0, len(kit.PROMPT) :].tolist()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model whose drafts are all accepted."""
    return kit.identical()


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> list[int]:
    """What it says without stops; the first six tokens are different ones."""
    tokens = kit.reference(model, kit.prompt_tensor())[0, len(kit.PROMPT) :].tolist()
    assert len(set(tokens[:6])) == 6
    return tokens


@pytest.mark.parametrize("index", range(6))
def test_an_eos_anywhere_in_a_block_ends_the_row(model: PreTrainedModel, plain: list[int], index: int) -> None:
    result = generate(model, eos_token_id=plain[index])
    assert new_tokens(result) == plain[: index + 1]
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(), eos_token_id=plain[index]))
    assert result.finish_reasons == ["stop"]


@pytest.mark.parametrize(("index", "expected", "reason"), [(2, 3, "stop"), (5, 4, "length"), (3, 4, "stop")])
def test_a_stop_and_the_cap_in_one_block(
    model: PreTrainedModel, plain: list[int], index: int, expected: int, reason: str
) -> None:
    result = generate(model, eos_token_id=plain[index], max_new_tokens=4, num_draft_tokens=6)
    assert new_tokens(result) == plain[:expected]
    assert result.finish_reasons == [reason]
    assert result.statistics.emitted == expected


def test_any_of_several_eos_tokens_ends_the_row(model: PreTrainedModel, plain: list[int]) -> None:
    result = generate(model, eos_token_id=[plain[4], plain[2]])
    assert new_tokens(result) == plain[:3]


def test_the_eos_tokens_of_the_checkpoint_are_followed(model: PreTrainedModel, plain: list[int]) -> None:
    model.generation_config.eos_token_id = [plain[3], 96]
    try:
        assert new_tokens(generate(model)) == plain[:4]
    finally:
        model.generation_config.eos_token_id = None


@pytest.mark.parametrize("index", range(1, 6))
def test_nothing_is_drafted_past_an_eos(model: PreTrainedModel, plain: list[int], index: int) -> None:
    statistics = generate(model, eos_token_id=plain[index], num_draft_tokens=8).statistics
    assert statistics.draft_tokens_processed == statistics.drafted == statistics.accepted == index
    # The EOS was a draft, so the round's own target token was cut away.
    assert (statistics.rounds, statistics.cut, statistics.emitted) == (1, 1, index + 1)
    assert statistics.acceptance_histogram == {index: 1}


def test_an_eos_from_prefill_ends_the_row_without_a_round(model: PreTrainedModel, plain: list[int]) -> None:
    statistics = generate(model, eos_token_id=plain[0]).statistics
    assert (statistics.rounds, statistics.emitted, statistics.early_layer_tokens) == (0, 1, len(kit.PROMPT))
    assert statistics.mean_acceptance_length is None
    assert statistics.draft_acceptance_rate is None


def test_an_eos_as_the_targets_own_token_is_not_cut() -> None:
    model = kit.rejected("llama")
    plain = kit.reference(model, kit.prompt_tensor())[0, len(kit.PROMPT) :].tolist()
    statistics = generate(model, eos_token_id=plain[5]).statistics
    ended = plain.index(plain[5])
    assert (statistics.emitted, statistics.rounds, statistics.cut) == (ended + 1, ended, 0)


@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_emitted_is_first_token_plus_accepted_plus_targets_minus_cut(grade: str) -> None:
    model = kit.graded("llama", grade)
    tokens = kit.reference(model, kit.prompt_tensor())[0, len(kit.PROMPT) :].tolist()
    for index in range(24):
        statistics = generate(model, eos_token_id=tokens[index], num_draft_tokens=5).statistics
        assert statistics.emitted == tokens.index(tokens[index]) + 1
        assert statistics.emitted == 1 + statistics.accepted + statistics.rounds - statistics.cut
        assert statistics.accepted <= statistics.drafted <= statistics.draft_tokens_processed


def test_max_length_counts_the_prompt(model: PreTrainedModel, plain: list[int]) -> None:
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_length=15)
    assert new_tokens(result) == plain[:5]


def test_without_a_length_twenty_tokens_as_generate_gives(model: PreTrainedModel, plain: list[int]) -> None:
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor())
    assert new_tokens(result) == plain[:20]
    assert result.sequences.shape == model.generate(kit.prompt_tensor(), do_sample=False).shape


def test_new_tokens_of_a_row_that_ended_early_are_given_without_padding() -> None:
    """The first row ends with a token that pads it as well; the other goes on."""
    model = kit.mixed()
    ids = torch.tensor([kit.PROMPT, kit.PROMPT[::-1]])
    plain = [kit.without_cache(model, row, 8) for row in ids.tolist()]
    eos = next(token for token in plain[0][1:3] if token not in plain[1])
    options = {"max_new_tokens": 8, "eos_token_id": eos, "pad_token_id": eos}
    result = Engine(model, exit_layer=2).generate(ids, **options)
    assert result.new_token_ids == [plain[0][: plain[0].index(eos) + 1], plain[1]]
    assert len(result.new_token_ids[0]) < result.sequences.shape[1] - ids.shape[1] == 8


# Everything that comes back is cut where `generate` ends


@cache
def graded(family: str, grade: str) -> PreTrainedModel:
    """A model of known acceptance; no test changes it."""
    return kit.graded(family, grade)


@cache
def plain_tokens(family: str, grade: str) -> tuple[int, ...]:
    """What it says without stops."""
    return tuple(kit.reference(graded(family, grade), kit.prompt_tensor())[0, WIDTH:].tolist())


@cache
def words() -> PreTrainedTokenizerFast:
    """One word, w0, w1, …, for each id of the models, and the word that transformers looks for before stop strings."""
    backend = Tokenizer(models.WordLevel({**{f"w{token}": token for token in range(kit.VOCAB)}, "abcdef": kit.VOCAB}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def same_as_generate(
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    criteria: Callable[[], list[Any]] = list,
    num_draft_tokens: int = 4,
    **arguments: Any,
) -> GenerationResult:
    """Generates with the model's own `generate`, with the engine and as a stream, and returns the engine's result.

    Tokens, text, scores, logits, events and statistics must all end at the same token.

    Args:
        criteria: makes the stopping criteria anew for each run.
    """
    options = {"max_new_tokens": 24, "pad_token_id": 0, "output_scores": True, "output_logits": True, **arguments}
    theirs = model.generate(
        kit.prompt_tensor(),
        do_sample=False,
        return_dict_in_generate=True,
        tokenizer=tokenizer,
        stopping_criteria=criteria(),
        **options,
    )
    engine = Engine(model, tokenizer, exit_layer=kit.EXIT_LAYER, num_draft_tokens=num_draft_tokens)
    ours = engine.generate(kit.prompt_tensor(), stopping_criteria=criteria(), **options)
    tokens = theirs.sequences[0, WIDTH:].tolist()
    assert new_tokens(ours) == tokens
    assert ours.new_token_ids == [tokens]
    for mine, other in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert len(mine) == len(tokens)
            torch.testing.assert_close(torch.stack(mine), torch.stack(other), atol=1e-5, rtol=1e-5)
    statistics = ours.statistics
    assert statistics.emitted == len(tokens) == 1 + statistics.accepted + statistics.rounds - statistics.cut
    events = list(engine.stream(kit.prompt_tensor(), stopping_criteria=criteria(), **options))
    assert [token for event in events for token in event.token_ids] == tokens
    assert sum(flag for event in events for flag in event.accepted) == statistics.accepted
    final = events[-1].result
    assert final is not None
    assert final.finish_reasons == ours.finish_reasons
    assert torch.equal(final.sequences, ours.sequences)
    if tokenizer is not None:
        assert ours.texts == [tokenizer.decode(tokens, skip_special_tokens=True)]
        assert "".join(event.text for event in events) == ours.texts[0]
    return ours


@pytest.mark.parametrize("index", range(1, 6))
@pytest.mark.parametrize(("family", "grade"), GRADED)
def test_an_eos_cuts_everything_at_the_same_token(family: str, grade: str, index: int) -> None:
    plain = plain_tokens(family, grade)
    result = same_as_generate(graded(family, grade), eos_token_id=plain[index])
    assert result.finish_reasons == ["stop"]
    assert len(new_tokens(result)) == plain.index(plain[index]) + 1


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_of_several_eos_tokens_the_first_to_come_ends_the_row(grade: str, num_draft_tokens: int) -> None:
    plain = plain_tokens("gemma2", grade)
    late, early = list(dict.fromkeys(plain))[3:0:-2]
    result = same_as_generate(graded("gemma2", grade), eos_token_id=[late, early], num_draft_tokens=num_draft_tokens)
    assert new_tokens(result)[-1] == early


@pytest.mark.parametrize("index", range(1, 11))
def test_a_stop_string_may_end_at_any_offset_of_a_block(index: int) -> None:
    """With every draft accepted, the first block holds new tokens 1 to 5 and the second 6 to 10."""
    plain = plain_tokens("llama", "all")
    result = same_as_generate(
        graded("llama", "all"), tokenizer=words(), stop_strings=f"w{plain[index - 1]} w{plain[index]}"
    )
    assert new_tokens(result) == list(plain[: index + 1])
    assert result.finish_reasons == ["stop"]
    assert result.statistics.cut == (index % 5 != 0)


@pytest.mark.parametrize("index", range(1, 6))
@pytest.mark.parametrize(("family", "grade"), GRADED)
def test_a_stop_string_of_one_word_equals_generate(family: str, grade: str, index: int) -> None:
    plain = plain_tokens(family, grade)
    result = same_as_generate(graded(family, grade), tokenizer=words(), stop_strings=[f"w{plain[index]}"])
    assert result.finish_reasons == ["stop"]
    assert len(new_tokens(result)) <= plain.index(plain[index]) + 1


@pytest.mark.parametrize("grade", ["some", "all"])
def test_of_several_stop_strings_the_first_to_be_complete_ends_the_row(grade: str) -> None:
    plain = plain_tokens("llama", grade)
    strings = [f"w{plain[6]}", f"w{plain[1]} w{plain[2]} w{plain[3]}", "never said"]
    result = same_as_generate(graded("llama", grade), tokenizer=words(), stop_strings=strings)
    assert new_tokens(result) == list(plain[:4])


def test_a_stop_string_may_end_inside_a_token() -> None:
    plain = plain_tokens("llama", "all")
    assert plain[3] == 95
    result = same_as_generate(graded("llama", "all"), tokenizer=words(), stop_strings=f"w{plain[2]} w9")
    assert new_tokens(result) == list(plain[:4])
    assert result.texts is not None
    assert result.texts[0].endswith(f"w{plain[2]} w95")


def test_a_stop_string_may_begin_in_the_prompt() -> None:
    plain = plain_tokens("llama", "some")
    result = same_as_generate(graded("llama", "some"), tokenizer=words(), stop_strings=f"w{kit.PROMPT[-1]} w{plain[0]}")
    assert new_tokens(result) == [plain[0]]


@pytest.mark.parametrize("grade", ["some", "all"])
def test_stop_strings_of_a_byte_level_tokenizer(grade: str) -> None:
    """The stop string's last character is spread over two tokens, the second of which goes on after it."""
    plain = plain_tokens("llama", grade)
    spelling = [b"one ", b"tw", b"o caf\xc3", b"\xa9s and", b" more"]
    tokenizer = kit.spelled(dict(zip(plain, spelling, strict=False)))
    result = same_as_generate(graded("llama", grade), tokenizer=tokenizer, stop_strings="two café")
    assert new_tokens(result) == list(plain[:4])
    assert result.texts == ["one two cafés and"]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_stop_strings_in_a_batch_equal_generate(position: int) -> None:
    """An EOS token that is never said makes `generate` fill finished rows."""
    model = graded("llama", "some")
    ids = torch.tensor([kit.PROMPT, [0, 0, *kit.PROMPT[:8]], kit.PROMPT[::-1]])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    plain = kit.reference(model, ids, attention_mask=mask)[:, WIDTH:]
    never = next(token for token in range(1, kit.VOCAB) if token not in plain.flatten())
    options = {
        "attention_mask": mask,
        "eos_token_id": never,
        "stop_strings": f"w{plain[position, 2]} w{plain[position, 3]}",
    }
    expected = kit.reference(model, ids, tokenizer=words(), **options)
    engine = Engine(model, words(), exit_layer=2)
    result = engine.generate(ids, max_new_tokens=24, pad_token_id=0, **options)
    assert torch.equal(result.sequences, expected)
    assert result.finish_reasons[position] == "stop"
    assert len(result.new_token_ids[position]) == 4
    assert result.texts == [words().decode(tokens) for tokens in result.new_token_ids]


# Criteria of the caller's own


class LastIs(StoppingCriteria):
    """Ends a row with a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **arguments: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


class LengthIs(StoppingCriteria):
    """Ends rows at a length, prompt and padding included: one for all, or one for each."""

    def __init__(self, length: int | list[int]) -> None:
        self.length = torch.tensor(length)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **arguments: Any) -> torch.Tensor:
        return (input_ids.shape[1] >= self.length).expand(len(input_ids))


class Unsure(StoppingCriteria):
    """Ends a row with the second token whose score is below the last one's; without scores with an even token."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **arguments: Any) -> torch.Tensor:
        if scores is None:
            return input_ids[:, -1] % 2 == 0
        assert len(scores) == input_ids.shape[1] - WIDTH
        assert scores[-1].shape == (len(input_ids), kit.VOCAB)
        assert torch.equal(scores[-1].argmax(-1), input_ids[:, -1])
        return (torch.stack(scores).amax(-1).diff(dim=0) < 0).sum(0) >= 2


class Fifth(StoppingCriteria):
    """Ends the row at the fifth call."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **arguments: Any) -> torch.Tensor:
        self.seen += input_ids.tolist()
        return torch.full((len(input_ids),), len(self.seen) >= 5)


@pytest.mark.parametrize("index", range(1, 6))
@pytest.mark.parametrize(("family", "grade"), GRADED)
def test_a_criterion_on_the_last_token_equals_generate(family: str, grade: str, index: int) -> None:
    plain = plain_tokens(family, grade)
    result = same_as_generate(graded(family, grade), criteria=lambda: [LastIs(plain[index])])
    assert len(new_tokens(result)) == plain.index(plain[index]) + 1
    assert result.finish_reasons == ["criteria"]


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
@pytest.mark.parametrize(("family", "grade"), GRADED)
def test_a_criterion_on_the_length_equals_generate(family: str, grade: str, num_draft_tokens: int) -> None:
    result = same_as_generate(graded(family, grade), criteria=lambda: [LengthIs(15)], num_draft_tokens=num_draft_tokens)
    assert new_tokens(result) == list(plain_tokens(family, grade)[:5])
    assert result.finish_reasons == ["criteria"]


@pytest.mark.parametrize("output_scores", [True, False])
@pytest.mark.parametrize(("family", "grade"), GRADED)
def test_a_criterion_that_reads_scores_equals_generate(family: str, grade: str, output_scores: bool) -> None:
    """`generate` shows criteria the scores if the caller asks for them, and `None` otherwise."""
    result = same_as_generate(graded(family, grade), criteria=lambda: [Unsure()], output_scores=output_scores)
    assert result.finish_reasons == ["criteria"]


@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_a_criterion_that_counts_its_calls_equals_generate_in_one_row(grade: str) -> None:
    """It is asked once for each emitted token, in order, and never about a rejected draft."""
    result = same_as_generate(graded("llama", grade), criteria=lambda: [Fifth()])
    counted = Fifth()
    Engine(graded("llama", grade), exit_layer=2).generate(
        kit.prompt_tensor(), max_new_tokens=24, stopping_criteria=[counted]
    )
    assert counted.seen == [kit.PROMPT + new_tokens(result)[:end] for end in range(1, 6)]


def test_limits_of_each_row_equal_generate() -> None:
    model = graded("llama", "some")
    ids = torch.tensor([kit.PROMPT, [0, 0, *kit.PROMPT[:8]], kit.PROMPT[::-1]])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    plain = kit.reference(model, ids, attention_mask=mask)
    never = next(token for token in range(1, kit.VOCAB) if token not in plain[:, WIDTH:])
    options = {"attention_mask": mask, "eos_token_id": never}
    expected = kit.reference(model, ids, stopping_criteria=[LengthIs([18, 13, 99])], **options)
    engine = Engine(model, exit_layer=2)
    result = engine.generate(
        ids, max_new_tokens=24, pad_token_id=0, stopping_criteria=[LengthIs([18, 13, 99])], **options
    )
    assert torch.equal(result.sequences, expected)
    assert [len(tokens) for tokens in result.new_token_ids] == [8, 3, 24]
    assert result.finish_reasons == ["criteria", "criteria", "length"]


@pytest.mark.parametrize("wrap", [bool, torch.tensor, lambda met: torch.tensor([met])], ids=["bool", "0-dim", "1-dim"])
def test_a_single_truth_value_serves_one_row_and_is_refused_for_several(wrap: Callable[[bool], Any]) -> None:
    def seven_more(ids: torch.Tensor, scores: Any, **arguments: Any) -> Any:
        return wrap(ids.shape[1] >= WIDTH + 7)

    model = graded("llama", "some")
    result = same_as_generate(model, criteria=lambda: [seven_more])
    assert len(new_tokens(result)) == 7
    with pytest.raises(ValueError, match=r"stopping_criteria: function returned .* for a batch of 2 rows"):
        Engine(model, exit_layer=2).generate(
            kit.prompt_tensor().repeat(2, 1), max_new_tokens=24, pad_token_id=0, stopping_criteria=[seven_more]
        )


@pytest.mark.parametrize("length", [5, 10, 11, 12])
def test_a_length_that_the_prompt_has_already_gives_one_token_as_in_generate(length: int) -> None:
    result = same_as_generate(graded("llama", "all"), criteria=lambda: [MaxLengthCriteria(length)], max_new_tokens=None)
    assert len(new_tokens(result)) == max(1, length - WIDTH)
    assert result.finish_reasons == ["length"]


@pytest.mark.parametrize(
    ("stops", "reason"),
    [
        ({"eos": 2, "criterion": 2, "string": 2}, "stop"),
        ({"criterion": 2, "string": 2}, "stop"),
        ({"criterion": 2}, "criteria"),
        ({"criterion": 1, "string": 2, "eos": 2}, "criteria"),
        ({"eos": 3}, "stop"),
        ({"string": 3, "criterion": 3}, "stop"),
        ({"criterion": 3}, "criteria"),
        ({"eos": 5, "string": 5, "criterion": 5}, "length"),
        ({}, "length"),
    ],
    ids=str,
)
def test_the_earliest_stop_gives_the_reason_and_at_one_token_stop_then_criteria_then_length(
    stops: dict[str, int], reason: str
) -> None:
    """All in one block: γ is 6, every draft is accepted, and the cap is 4 tokens."""
    plain = plain_tokens("llama", "all")
    options: dict[str, Any] = {}
    if "eos" in stops:
        options["eos_token_id"] = plain[stops["eos"]]
    if "string" in stops:
        options |= {"tokenizer": words(), "stop_strings": f"w{plain[stops['string']]}"}
    if "criterion" in stops:
        options["criteria"] = lambda: [LastIs(plain[stops["criterion"]])]
    result = same_as_generate(graded("llama", "all"), max_new_tokens=4, num_draft_tokens=6, **options)
    assert result.finish_reasons == [reason]
    assert new_tokens(result) == list(plain[: min([*(index + 1 for index in stops.values()), 4])])
    assert result.statistics.rounds == 1


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_max_time_ends_a_row_at_the_token_that_generate_ends_it_at(
    monkeypatch: pytest.MonkeyPatch, grade: str, num_draft_tokens: int
) -> None:
    """The clock advances by a second whenever it is read: once when the call begins, once for each token."""
    seconds = count()
    clock = SimpleNamespace(time=lambda: next(seconds))
    monkeypatch.setattr("transformers.generation.stopping_criteria.time", clock)
    result = same_as_generate(graded("llama", grade), max_time=6.5, num_draft_tokens=num_draft_tokens)
    assert len(new_tokens(result)) == 7
    assert result.finish_reasons == ["criteria"]


# Lengths


@pytest.mark.parametrize("lengths", [{"min_new_tokens": 5}, {"min_length": WIDTH + 5}, {"min_length": 3}], ids=str)
@pytest.mark.parametrize("num_draft_tokens", [1, 6])
@pytest.mark.parametrize(("family", "grade"), GRADED)
def test_a_minimum_holds_an_eos_back(family: str, grade: str, num_draft_tokens: int, lengths: dict[str, int]) -> None:
    plain = plain_tokens(family, grade)
    result = same_as_generate(
        graded(family, grade), eos_token_id=plain[1], num_draft_tokens=num_draft_tokens, **lengths
    )
    if lengths == {"min_length": 3}:
        # The prompt is longer than that, and counts.
        assert len(new_tokens(result)) == plain.index(plain[1]) + 1
    else:
        assert len(new_tokens(result)) >= 5
        assert plain[1] not in new_tokens(result)[:5]


def test_max_length_counts_padding() -> None:
    model = graded("llama", "some")
    ids = torch.tensor([kit.PROMPT, [0] * 6 + kit.PROMPT[:4]])
    mask = torch.tensor([[1] * 10, [0] * 6 + [1] * 4])
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_length=15, pad_token_id=0)
    result = Engine(model, exit_layer=2).generate(ids, attention_mask=mask, max_length=15, pad_token_id=0)
    assert torch.equal(result.sequences, expected)
    assert [len(tokens) for tokens in result.new_token_ids] == [5, 5]


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_no_more_is_drafted_than_can_be_emitted(grade: str, num_draft_tokens: int) -> None:
    engine = Engine(graded("llama", grade), exit_layer=2, num_draft_tokens=num_draft_tokens)
    for budget in range(1, 12):
        events = list(engine.stream(kit.prompt_tensor(), max_new_tokens=budget))
        assert [token for event in events for token in event.token_ids] == list(plain_tokens("llama", grade)[:budget])
        emitted = possible = 0
        for event in events:
            if emitted:
                possible += min(num_draft_tokens, budget - emitted - 1)
            emitted += len(event.token_ids)
        result = events[-1].result
        assert result is not None
        statistics = result.statistics
        assert statistics.draft_tokens_processed == statistics.drafted == possible
        assert statistics.cut == 0
        assert result.finish_reasons == ["length"]


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
@pytest.mark.parametrize("factor", [1.0, 0.3, 0.0])
def test_learned_positions_are_used_up_to_the_last_and_never_passed(factor: float, num_draft_tokens: int) -> None:
    model = kit.scale_late_layers(kit.build(kit.gpt2_config(n_positions=32)), factor)
    ids = kit.prompt_tensor((kit.PROMPT * 3)[:24])
    expected = kit.reference(model, ids, max_new_tokens=8)
    positions: list[torch.Tensor] = []
    handle = model.transformer.wpe.register_forward_pre_hook(lambda _, inputs: positions.append(inputs[0].flatten()))
    result = Engine(model, exit_layer=2, num_draft_tokens=num_draft_tokens).generate(ids, max_new_tokens=8)
    handle.remove()
    assert torch.equal(result.sequences, expected)
    assert 24 + 6 <= int(torch.cat(positions).max()) <= 31
