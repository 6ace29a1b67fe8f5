"""Drafting from a list of tokens: the output stays the full model's, drafts come from the list, and who decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Engine
from layerskip.decoding.drafting import Draft, Drafting
from layerskip.decoding.plan import Limits, Plan, Wishes, make_plan
from layerskip.model.draft_head import DraftHead
from layerskip.model.layered import LayeredModel
from layerskip.model.metadata import Metadata
from tests import kit

PROMPTS = [kit.PROMPT, kit.PROMPT[4:], [8, 20]]
SHORT: dict[str, Any] = {"max_new_tokens": 6}


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model of which some drafts are accepted."""
    return kit.graded(request.param, "some")


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All tokens that any call drafts, in order."""
    seen: list[int] = []
    intact = Drafting.draft

    def recording(drafting: Drafting, *arguments: Any) -> Draft:
        draft = intact(drafting, *arguments)
        seen.extend(token for tokens in draft.tokens for token in tokens)
        return draft

    monkeypatch.setattr(Drafting, "draft", recording)
    return seen


@cache
def reference_of(model: PreTrainedModel, prompt: tuple[int, ...]) -> torch.Tensor:
    """Returns the prompt and what `generate` adds; for models that stay as they are."""
    return kit.reference(model, kit.prompt_tensor(list(prompt)))


def expected_ids(model: PreTrainedModel, prompt: list[int] = kit.PROMPT) -> list[int]:
    """Returns the new tokens that `generate` gives."""
    return reference_of(model, tuple(prompt))[0, len(prompt) :].tolist()


def by_use(model: PreTrainedModel) -> torch.Tensor:
    """Returns all token ids, those first that the model emits, so that a list of a few already helps."""
    emitted = list(dict.fromkeys(expected_ids(model)))
    return torch.tensor(emitted + [token for token in range(kit.VOCAB) if token not in emitted])


def never_emitted(model: PreTrainedModel) -> torch.Tensor:
    return torch.tensor([token for token in range(kit.VOCAB) if token not in expected_ids(model)])


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns prompts with padding on the left, and their mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])


# The output


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 7, 30, 96, 97])
def test_equals_generate_at_every_size(
    model: PreTrainedModel, size: int, exit_layer: int, num_draft_tokens: int
) -> None:
    engine = Engine(model, exit_layer=exit_layer, draft_vocab_size=size, draft_token_ids=by_use(model))
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24, num_draft_tokens=num_draft_tokens)
    assert torch.equal(result.sequences, reference_of(model, tuple(kit.PROMPT)))


def test_the_more_of_the_emitted_tokens_the_list_has_the_more_drafts_are_accepted(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=3, draft_token_ids=by_use(model))
    counts = [
        engine.generate(kit.prompt_tensor(), max_new_tokens=24, draft_vocab_size=size).statistics.accepted
        for size in (1, 30)
    ]
    assert counts[0] < counts[1]


def test_equals_generate_where_the_list_has_none_of_the_emitted_tokens(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2, draft_token_ids=never_emitted(model))
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    assert torch.equal(result.sequences, reference_of(model, tuple(kit.PROMPT)))
    assert result.statistics.accepted == 0 < result.statistics.drafted


@pytest.mark.parametrize("size", [1, 12])
def test_rows_of_a_ragged_batch_equal_their_solo_runs(model: PreTrainedModel, size: int) -> None:
    ids, mask = padded(PROMPTS)
    engine = Engine(model, exit_layer=2, draft_token_ids=by_use(model)[:size])
    result = engine.generate(ids, attention_mask=mask, max_new_tokens=24)
    for row, prompt in enumerate(PROMPTS):
        assert result.sequences[row, ids.shape[1] :].tolist() == expected_ids(model, prompt)


def test_a_head_with_a_bias_and_an_end_token_outside_the_list() -> None:
    model = kit.mixed()
    head = torch.nn.Linear(32, kit.VOCAB)
    head.weight = model.get_output_embeddings().weight
    torch.manual_seed(1)
    torch.nn.init.normal_(head.bias)
    model.set_output_embeddings(head.eval())
    eos = expected_ids(model)[9]
    ids = torch.tensor([token for token in by_use(model).tolist() if token != eos][:20])
    result = Engine(model, exit_layer=2, draft_token_ids=ids).generate(
        kit.prompt_tensor(), max_new_tokens=24, eos_token_id=eos, pad_token_id=0
    )
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(), eos_token_id=eos))
    assert result.finish_reasons == ["stop"]


@pytest.mark.parametrize("size", [1, 7])
def test_verifying_with_the_trimmed_head_would_change_the_output(
    model: PreTrainedModel, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control of all above: these lists are short enough for the mistake to show."""
    ids = by_use(model)[:size]
    intact = LayeredModel.logits

    def trimmed(layered: LayeredModel, hidden: torch.Tensor) -> torch.Tensor:
        logits = intact(layered, hidden)
        return torch.full_like(logits, -torch.inf).index_copy(-1, ids, logits[..., ids])

    expected = kit.reference(model, kit.prompt_tensor())
    monkeypatch.setattr(LayeredModel, "logits", trimmed)
    result = Engine(model, exit_layer=2, draft_token_ids=ids).generate(kit.prompt_tensor(), max_new_tokens=24)
    assert not torch.equal(result.sequences, expected)


# The drafts


@pytest.mark.parametrize("size", [1, 5, 40])
def test_drafts_come_from_the_first_of_the_list_alone(model: PreTrainedModel, size: int, drafted: list[int]) -> None:
    ids = by_use(model)
    engine = Engine(model, exit_layer=2, draft_token_ids=ids)
    engine.generate(kit.prompt_tensor(), max_new_tokens=24, draft_vocab_size=size)
    assert drafted and set(drafted) <= set(ids[:size].tolist())
    drafted.clear()
    engine.generate(kit.prompt_tensor(), max_new_tokens=24, draft_vocab_size=kit.VOCAB)
    if size < 40:
        assert not set(drafted) <= set(ids[:size].tolist())


def test_where_exit_and_model_agree_the_tokens_of_the_list_are_those_accepted() -> None:
    model = kit.identical()
    known = set(expected_ids(model)[::2])
    engine = Engine(model, exit_layer=2, num_draft_tokens=1, draft_token_ids=torch.tensor(sorted(known)))
    events = list(engine.stream(kit.prompt_tensor(), max_new_tokens=24))
    assert [token for event in events for token in event.token_ids] == expected_ids(model)
    # With one draft a round, every round's first token was drafted where it could be; prefill comes first.
    drafts = [event for event in events[1:] if len(event.token_ids) == 2 or event.token_ids[0] not in known]
    assert len(drafts) >= len(events) - 2
    assert any(event.accepted[0] for event in drafts) and not all(event.accepted[0] for event in drafts)
    assert all(event.accepted[0] == (event.token_ids[0] in known) for event in drafts)


def test_layers_are_counted_as_with_the_full_head(model: PreTrainedModel) -> None:
    engine = Engine(model, exit_layer=2, draft_token_ids=by_use(model)[:9])
    with kit.counted_layers(model) as counts:
        statistics = engine.generate(kit.prompt_tensor(), max_new_tokens=24).statistics
    work = len(kit.PROMPT) + statistics.draft_tokens_processed + statistics.rounds
    assert statistics.early_layer_tokens == statistics.late_layer_tokens == work
    assert counts == [work] * kit.NUM_LAYERS


def test_the_draft_head_is_made_anew_for_each_call() -> None:
    model = kit.mixed()
    engine = Engine(model, exit_layer=2, draft_token_ids=by_use(model)[:9])
    engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    model.set_output_embeddings(kit.build(kit.llama_config(), seed=7).get_output_embeddings())
    exchanged = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    fresh = Engine(model, exit_layer=2, draft_token_ids=engine.draft_token_ids)
    again = fresh.generate(kit.prompt_tensor(), max_new_tokens=24)
    assert torch.equal(exchanged.sequences, kit.reference(model, kit.prompt_tensor()))
    assert exchanged.statistics.acceptance_histogram == again.statistics.acceptance_histogram


# Who decides


def plan_of(
    call: int | None = None,
    engine: int | None = None,
    stored: int | None = None,
    ids: int = 20,
    strategy: str = "self_speculative",
) -> Plan:
    """Returns the plan of a call where each says this draft_vocab_size and `ids` token ids are there."""
    return make_plan(
        strategy,
        Wishes(draft_vocab_size=call),
        engine=Wishes(exit_layer=2, draft_vocab_size=engine),
        metadata=Metadata(draft_vocab_size=stored),
        limits=Limits(kit.NUM_LAYERS, kit.VOCAB, ids),
    )


@pytest.mark.parametrize(
    ("says", "size"),
    [
        ({"call": 5, "engine": 6, "stored": 7}, 5),
        ({"engine": 6, "stored": 7}, 6),
        ({"stored": 7}, 7),
        ({}, 20),
        ({"call": 1}, 1),
        ({"call": 20, "engine": 6}, 20),
        ({"call": 97, "engine": 6}, None),
        ({"engine": 97, "stored": 7}, None),
        ({"stored": 97}, None),
        ({"call": 5, "engine": 97}, 5),
        ({"ids": 97}, None),
        ({"ids": 97, "stored": 96}, 96),
        ({"ids": 0}, None),
        ({"ids": 0, "call": 97}, None),
        # A model that was given to an engine without the file beside its checkpoint.
        ({"ids": 0, "stored": 7}, None),
    ],
    ids=str,
)
def test_the_call_goes_before_the_engine_before_the_checkpoint(says: dict[str, int], size: int | None) -> None:
    assert plan_of(**says).draft_vocab_size == size


@pytest.mark.parametrize("strategy", ["autoregressive", "early_exit"])
def test_other_strategies_have_no_draft_vocabulary(strategy: str) -> None:
    assert plan_of(strategy=strategy, engine=6, stored=7).draft_vocab_size is None
    with pytest.raises(ValueError, match=f"draft_vocab_size=5 has no meaning with strategy='{strategy}'; leave it out"):
        plan_of(strategy=strategy, call=5)


def test_where_no_exit_pays_a_draft_vocabulary_needs_an_exit_layer() -> None:
    nothing = {"engine": Wishes(), "metadata": Metadata(compared=True), "limits": Limits(4, 97, 20)}
    assert make_plan("self_speculative", Wishes(), **nothing) == Plan("autoregressive")
    with pytest.raises(ValueError, match="the checkpoint says that no exit pays"):
        make_plan("self_speculative", Wishes(draft_vocab_size=5), **nothing)


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The lists for which draft heads are made."""
    made: list[list[int]] = []
    intact: Callable[..., DraftHead] = DraftHead.of

    def recording(layered: LayeredModel, token_ids: torch.Tensor) -> DraftHead:
        made.append(token_ids.tolist())
        return intact(layered, token_ids)

    monkeypatch.setattr(DraftHead, "of", recording)
    yield made


@pytest.mark.parametrize("streamed", [False, True])
def test_the_engine_follows_its_call(heads: list[list[int]], streamed: bool) -> None:
    ids = torch.tensor([9, 4, 60, 2, 33])
    engine = Engine(kit.mixed(), exit_layer=2, draft_vocab_size=3, draft_token_ids=ids)

    def run(**arguments: Any) -> None:
        if streamed:
            list(engine.stream(kit.prompt_tensor(), **SHORT, **arguments))
        else:
            engine.generate(kit.prompt_tensor(), **SHORT, **arguments)

    for arguments in ({}, {"draft_vocab_size": 2}, {"draft_vocab_size": 97}, {"strategy": "autoregressive"}, {}):
        run(**arguments)
    assert heads == [[4, 9, 60], [4, 9], [4, 9, 60]]


def test_copying_the_rows_is_time_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    intact: Callable[..., DraftHead] = DraftHead.of

    def slow(layered: LayeredModel, token_ids: torch.Tensor) -> DraftHead:
        time.sleep(0.05)
        return intact(layered, token_ids)

    monkeypatch.setattr(DraftHead, "of", slow)
    engine = Engine(kit.mixed(), exit_layer=2, draft_token_ids=torch.tensor([9, 4, 60, 2, 33]))
    statistics = engine.generate(kit.prompt_tensor(), **SHORT).statistics
    assert statistics.seconds["other"] >= 0.05
    assert statistics.per_row[0].seconds["other"] >= 0.05


def test_of_equal_logits_the_lowest_id_is_drafted_whatever_the_order_of_the_list(drafted: list[int]) -> None:
    model = kit.mixed()
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    Engine(model, exit_layer=2, draft_token_ids=torch.tensor([9, 4, 60, 2])).generate(
        kit.prompt_tensor(), draft_vocab_size=3, **SHORT
    )
    assert set(drafted) == {4}


def test_a_plan_says_what_a_call_will_do() -> None:
    engine = Engine(kit.mixed(), draft_vocab_size=3, draft_token_ids=torch.tensor([9, 4, 60, 2, 33]))
    assert engine.plan("self_speculative", Wishes(exit_layer=2)) == Plan("self_speculative", 2, 4, 3)
    assert engine.plan("self_speculative", Wishes(2, 5, 97)) == Plan("self_speculative", 2, 5, None)
    with pytest.raises(ValueError, match="needs exit_layer"):
        engine.plan("self_speculative", Wishes())


def test_an_engine_without_a_list_has_the_full_head(heads: list[list[int]]) -> None:
    Engine(kit.mixed(), exit_layer=2).generate(kit.prompt_tensor(), **SHORT)
    Engine(kit.mixed(), exit_layer=2, draft_vocab_size=97).generate(kit.prompt_tensor(), **SHORT)
    assert heads == []


# What is refused

SIZES = [(0, ValueError), (-1, ValueError), (6, ValueError), (96, ValueError), (98, ValueError)]
SIZES += [("5", TypeError), (2.0, TypeError), (97.0, TypeError), (True, TypeError), ([5], TypeError)]


@pytest.mark.parametrize(("size", "error"), SIZES, ids=repr)
def test_a_size_that_there_are_no_ids_for(size: Any, error: type[Exception]) -> None:
    model = kit.mixed()
    ids = torch.tensor([9, 4, 60, 2, 33])
    message = r"draft_vocab_size=.*allowed are 1 to 5 \(as many draft_token_ids are there\) and 97"
    with kit.counted_layers(model) as counts:
        with pytest.raises(error, match=message):
            Engine(model, exit_layer=2, draft_vocab_size=size, draft_token_ids=ids)
        for call in (Engine.generate, Engine.stream):
            with pytest.raises(error, match=message):
                call(Engine(model, exit_layer=2, draft_token_ids=ids), kit.prompt_tensor(), draft_vocab_size=size)
    assert counts == [0] * kit.NUM_LAYERS


@pytest.mark.parametrize("size", [1, 96, 98])
def test_without_a_list_the_full_head_alone_is_allowed(size: int) -> None:
    message = r"draft_vocab_size=.*allowed is 97.*no draft_token_ids are there; a training recipe with"
    with pytest.raises(ValueError, match=message):
        Engine(kit.mixed(), draft_vocab_size=size)
    with pytest.raises(ValueError, match=message):
        Engine(kit.mixed(), exit_layer=2).generate(kit.prompt_tensor(), draft_vocab_size=size, **SHORT)


def test_a_stored_size_out_of_range_is_named_and_may_be_overridden() -> None:
    with pytest.raises(ValueError, match=r"the checkpoint's draft_vocab_size=21 is out of range"):
        plan_of(stored=21)
    assert plan_of(stored=21, call=5).draft_vocab_size == 5


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, 2], TypeError, "draft_token_ids is a list"),
        (torch.tensor([1.0]), ValueError, "torch.float32"),
        (torch.tensor([[1]]), ValueError, r"shape \(1, 1\)"),
        (torch.tensor([1, 1]), ValueError, "the token id 1 more than once"),
        (torch.tensor([-1, 1]), ValueError, "the token id -1"),
        (torch.tensor([1, 97]), ValueError, "the token id 97; the model's vocabulary is 0 to 96"),
    ],
    ids=str,
)
def test_a_list_that_the_model_cannot_draft_from(ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Engine(kit.mixed(), draft_token_ids=ids)


def test_a_head_without_rows_is_refused_before_any_layer_runs_and_the_full_head_works() -> None:
    model = kit.mixed()
    plain = model.get_output_embeddings()

    class Own(torch.nn.Linear):
        pass

    own = Own(32, kit.VOCAB, bias=False)
    own.weight = plain.weight
    model.set_output_embeddings(own.eval())
    engine = Engine(model, exit_layer=2, draft_token_ids=torch.tensor([4, 9]))
    with kit.counted_layers(model) as counts, pytest.raises(ValueError, match="draft_vocab_size=97"):
        engine.generate(kit.prompt_tensor(), **SHORT)
    assert counts == [0] * kit.NUM_LAYERS
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24, draft_vocab_size=97)
    assert torch.equal(result.sequences, kit.reference(kit.mixed(), kit.prompt_tensor()))


@pytest.mark.cuda
def test_equals_generate_on_cuda() -> None:
    model = kit.mixed().to("cuda")
    ids = kit.prompt_tensor().to("cuda")
    result = Engine(model, exit_layer=2, draft_token_ids=torch.arange(30)).generate(ids, max_new_tokens=24)
    assert torch.equal(result.sequences, kit.reference(model, ids))
