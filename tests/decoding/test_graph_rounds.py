"""Compiled rounds through the engine and the hook: the tokens of `generate`, what is counted, and graphs on loan."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from itertools import zip_longest
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import layerskip
from layerskip import Engine
from layerskip.decoding import call, graph_rounds
from layerskip.decoding.compiled import CompiledRounds, CompiledSettings
from layerskip.decoding.result import GenerationResult
from layerskip.model.layered import LayeredModel
from tests import kit

NEW = 20
GAMMA = 2
DRAFT_IDS = torch.arange(0, kit.VOCAB, 3)
BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "mixed": kit.mixed,
    "identical": kit.identical,
    "gemma2": lambda: kit.graded("gemma2", "some"),
}
CASES = [*((name, "self_speculative") for name in BUILDERS), ("mixed", "autoregressive"), ("mixed", "early_exit")]
USER_TURN = torch.tensor([[61, 17, 30, 2, 85]])


@pytest.fixture(autouse=True)
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch trace rounds and run what it has traced as it stands."""
    monkeypatch.setattr(call, "CompiledSettings", partial(CompiledSettings, backend="eager"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CompiledRounds]:
    """Runs rounds without even tracing them, which takes seconds; holds the graphs that are made."""
    graphs: list[CompiledRounds] = []

    def make(model: LayeredModel, settings: CompiledSettings) -> CompiledRounds:
        graphs.append(CompiledRounds(model, settings))
        return graphs[-1]

    monkeypatch.setattr(graph_rounds, "CompiledRounds", make)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return graphs


untraced = pytest.mark.usefixtures("made")


@cache
def model_of(name: str) -> PreTrainedModel:
    """A model that tests share, so that none may change it."""
    return BUILDERS[name]()


def compiled(name: str = "mixed", **arguments: Any) -> Engine:
    """Returns an engine without graphs yet."""
    model = model_of(name)
    return Engine(model, exit_layer=kit.EXIT_LAYER, num_draft_tokens=GAMMA, compile=True, **arguments)


@cache
def shared(name: str = "mixed") -> Engine:
    """Returns an engine that keeps its graphs from test to test."""
    return compiled(name, tokenizer=kit.word_tokenizer())


@cache
def calls(name: str, strategy: str) -> tuple[GenerationResult, GenerationResult]:
    """Returns the results of the first two calls of a kind."""
    engine = compiled(name)
    arguments: dict[str, Any] = {"strategy": strategy, "max_new_tokens": NEW}
    if strategy == "autoregressive":
        engine = Engine(model_of(name), compile=True)
    first = engine.generate(kit.prompt_tensor(), **arguments)
    return first, engine.generate(kit.prompt_tensor(kit.PROMPT[::-1]), **arguments)


def answer(name: str = "mixed", **arguments: Any) -> list[int]:
    """Returns the new tokens of plain greedy `generate`."""
    return kit.reference(model_of(name), kit.prompt_tensor(), **{"max_new_tokens": NEW, **arguments})[0, 10:].tolist()


# Tokens


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_tokens_are_those_of_generate(name: str, strategy: str) -> None:
    model = model_of(name)
    if strategy == "early_exit":
        model = kit.truncated(model, kit.EXIT_LAYER)
    for result, prompt in zip(calls(name, strategy), (kit.PROMPT, kit.PROMPT[::-1]), strict=True):
        assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(prompt), NEW))
        assert result.finish_reasons == ["length"]


@untraced
@pytest.mark.parametrize("budget", range(1, 9))
def test_every_budget_is_kept(budget: int) -> None:
    for name in ("mixed", "identical"):
        result = shared(name).generate(kit.prompt_tensor(), max_new_tokens=budget)
        assert result.new_token_ids == [answer(name)[:budget]]


def test_nothing_is_compiled_where_prefill_ends_the_answer(made: list[CompiledRounds]) -> None:
    result = compiled().generate(kit.prompt_tensor(), max_new_tokens=1)
    assert result.statistics.compile_seconds == 0.0 and not any(graphs.is_prepared for graphs in made)


@untraced
def test_an_answer_ends_at_eos_inside_a_round() -> None:
    """The EOS token is the second draft of the first round."""
    expected = answer("identical")[:3]
    assert len(set(expected)) == 3
    result = compiled("identical").generate(kit.prompt_tensor(), max_new_tokens=NEW, eos_token_id=expected[-1])
    assert (result.new_token_ids, result.finish_reasons) == ([expected], ["stop"])
    figures = result.statistics
    assert (figures.rounds, figures.cut, figures.emitted) == (1, 1, 3)
    assert figures.drafted == figures.accepted == 2
    assert figures.draft_tokens_processed == figures.draft_tokens_verified == GAMMA


@untraced
def test_drafts_from_a_trimmed_head_leave_the_tokens_alone() -> None:
    engine = compiled(draft_token_ids=DRAFT_IDS)
    accepted = []
    for event in engine.stream(kit.prompt_tensor(), max_new_tokens=NEW):
        accepted += [token for token, flag in zip(event.token_ids, event.accepted, strict=True) if flag]
    assert event.result is not None and event.result.new_token_ids == [answer()]
    assert accepted and set(accepted) <= set(DRAFT_IDS.tolist())


def test_stop_strings_end_an_answer_inside_a_round(made: list[CompiledRounds]) -> None:
    tokenizer = kit.spelled({answer("identical")[2]: b"stop"})
    expected = answer("identical", stop_strings=["top"], tokenizer=tokenizer)
    engine = compiled("identical", tokenizer=tokenizer)
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=NEW, stop_strings=["top"])
    assert (result.new_token_ids, result.finish_reasons) == ([expected], ["stop"])
    assert len(expected) == 3 and result.statistics.cut == 1


class Ends:
    """A stopping criterion: a row ends behind so many tokens, prompt and all."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= self.length)


@untraced
@pytest.mark.parametrize("length", range(1, 7))
def test_criteria_end_an_answer_wherever_in_a_round(length: int) -> None:
    criteria = [Ends(len(kit.PROMPT) + length)]
    result = shared("identical").generate(kit.prompt_tensor(), max_new_tokens=NEW, stopping_criteria=criteria)
    assert (result.new_token_ids, result.finish_reasons) == ([answer("identical")[:length]], ["criteria"])


# Counts


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_layers_and_rounds_are_counted(name: str, strategy: str) -> None:
    for result in calls(name, strategy):
        figures = result.statistics
        drafts = GAMMA if strategy == "self_speculative" else 0
        processed = drafts * figures.rounds
        assert figures.draft_tokens_processed == figures.draft_tokens_verified == processed
        assert figures.early_layer_tokens == len(kit.PROMPT) + processed + figures.rounds
        late = 0 if strategy == "early_exit" else figures.early_layer_tokens
        assert (figures.late_layer_tokens, figures.padding_tokens) == (late, 0)
        assert figures.emitted == NEW == 1 + figures.accepted + figures.rounds - figures.cut
        exit_layer = kit.NUM_LAYERS if strategy == "autoregressive" else kit.EXIT_LAYER
        assert figures.rounds_by_exit == {exit_layer: figures.rounds}
        (tally,) = figures.tallies
        assert tally.work == {(exit_layer, drafts, drafts): figures.rounds}
        assert figures.accepted <= figures.drafted <= processed


@untraced
def test_drafts_that_the_budget_has_no_room_for_do_not_count() -> None:
    """A first token, two drafts and a target, a draft and a target."""
    figures = shared("identical").generate(kit.prompt_tensor(), max_new_tokens=6).statistics
    assert (figures.rounds, figures.drafted, figures.accepted, figures.draft_tokens_processed) == (2, 3, 3, 4)
    assert figures.acceptance_histogram == {1: 1, 2: 1}
    assert figures.acceptance_by_position == (1.0, 1.0)


def test_drafts_and_acceptance_are_those_of_rounds_that_are_not_compiled() -> None:
    accepted = drafted = 0
    for name in ("mixed", "gemma2"):
        for compiled_one, prompt in zip(calls(name, "self_speculative"), (kit.PROMPT, kit.PROMPT[::-1]), strict=True):
            plain = compiled(name).generate(kit.prompt_tensor(prompt), max_new_tokens=NEW, compile=False)
            assert compiled_one.statistics.tallies[0].outcomes == plain.statistics.tallies[0].outcomes
            accepted += plain.statistics.accepted
            drafted += plain.statistics.drafted
    assert 0 < accepted < drafted


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_a_call_of_a_kind_that_was_compiled_compiles_nothing(name: str, strategy: str) -> None:
    first, second = (result.statistics for result in calls(name, strategy))
    assert first.compile_seconds > 0.0 == second.compile_seconds
    assert first.per_row[0].compile_seconds == first.compile_seconds


def test_compiling_is_timed_apart(made: list[CompiledRounds], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which warming up takes hours."""
    engine, clock, hours = compiled(), time.perf_counter, 0.0
    run = CompiledRounds._run

    def slow(graphs: CompiledRounds, *feed: int) -> list[int]:
        nonlocal hours
        hours += 0 if graphs.is_prepared else 1
        return run(graphs, *feed)

    monkeypatch.setattr(CompiledRounds, "_run", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * hours)
    figures = engine.generate(kit.prompt_tensor(), max_new_tokens=NEW).statistics
    assert figures.compile_seconds > 3 * 3600 > 3600 > sum(figures.seconds.values()) > 0.0
    assert list(figures.seconds) == ["prefill", "draft", "verify", "other"]


def test_graphs_of_one_kind_serve_all_prompts_of_similar_length(made: list[CompiledRounds]) -> None:
    engine = compiled()
    for prompt in (kit.PROMPT, kit.PROMPT[:3]):
        for budget in (4, NEW):
            engine.generate(kit.prompt_tensor(prompt), max_new_tokens=budget)
    assert len(made) == 1
    engine.generate(kit.prompt_tensor(), max_new_tokens=NEW, num_draft_tokens=1)
    engine.generate(kit.prompt_tensor(), max_new_tokens=NEW)
    assert [graphs.settings.num_draft_tokens for graphs in made] == [GAMMA, 1]


# Conversations


def test_turns_go_on_from_the_cache(made: list[CompiledRounds]) -> None:
    engine, model = compiled(), model_of("mixed")
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=8, return_cache=True)
    prompt = torch.cat([first.sequences, USER_TURN], 1)
    expected = kit.reference(model, prompt, 12)
    # Twice: the cache is a copy that no later call writes to.
    for _ in range(2):
        second = engine.generate(prompt, max_new_tokens=12, cache=first.cache, return_cache=True)
        assert torch.equal(second.sequences, expected)
        figures = second.statistics
        assert figures.early_layer_tokens == 1 + USER_TURN.shape[1] + (GAMMA + 1) * figures.rounds
    third = torch.cat([second.sequences, USER_TURN.flip(1)], 1)
    assert torch.equal(
        engine.generate(third, max_new_tokens=8, cache=second.cache).sequences, kit.reference(model, third, 8)
    )
    assert len(made) == 1


@untraced
def test_compiled_and_other_turns_go_on_from_each_others_cache() -> None:
    engine, model = shared(), model_of("mixed")
    for one, other in ((True, False), (False, True)):
        first = engine.generate(kit.prompt_tensor(), max_new_tokens=8, return_cache=True, compile=one)
        prompt = torch.cat([first.sequences, USER_TURN], 1)
        second = engine.generate(prompt, max_new_tokens=12, cache=first.cache, compile=other)
        assert torch.equal(second.sequences, kit.reference(model, prompt, 12))


@untraced
def test_a_first_turn_may_come_from_a_cache_alone() -> None:
    """Graphs whose cache has held nothing yet take in what another engine has cached."""
    first = Engine(model_of("gemma2"), exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=8, return_cache=True)
    prompt = torch.cat([first.sequences, USER_TURN], 1)
    result = compiled("gemma2").generate(prompt, max_new_tokens=12, cache=first.cache)
    assert torch.equal(result.sequences, kit.reference(model_of("gemma2"), prompt, 12))


# Streams


@untraced
def test_a_stream_yields_an_event_a_round() -> None:
    events = list(shared("identical").stream(kit.prompt_tensor(), max_new_tokens=1 + 3 + 3))
    assert [event.accepted for event in events] == [(False,), *[(True, True, False)] * 2]
    assert [token for event in events for token in event.token_ids] == answer("identical")[:7]
    assert [event.result is None for event in events] == [True, True, False]
    result = events[-1].result
    assert result is not None and result.texts == ["".join(event.text for event in events)] != [""]


def test_interleaved_streams_have_graphs_of_their_own(made: list[CompiledRounds]) -> None:
    engine = compiled()
    prompts = [kit.PROMPT, kit.PROMPT[::-1]]
    streams = [engine.stream(kit.prompt_tensor(prompt), max_new_tokens=NEW) for prompt in prompts]
    rows: list[list[int]] = [[], []]
    for events in zip_longest(*streams):
        for row, event in zip(rows, events, strict=True):
            row += [] if event is None else event.token_ids
    for row, prompt in zip(rows, prompts, strict=True):
        assert row == kit.reference(model_of("mixed"), kit.prompt_tensor(prompt), NEW)[0, len(prompt) :].tolist()
    assert len(made) == 2
    assert engine.generate(kit.prompt_tensor(), max_new_tokens=NEW).new_token_ids == [rows[0]]
    assert len(made) == 2


# What is lent is given back


class Raises(BaseStreamer):
    """A streamer that fails when it gets its third block; the prompt is the first."""

    def __init__(self) -> None:
        self.blocks = 0

    def put(self, value: torch.Tensor) -> None:
        self.blocks += 1
        if self.blocks == 3:
            raise OSError("the line is cut")

    def end(self) -> None:
        """Never comes."""


class Fails:
    """A stopping criterion that fails in the middle."""

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if ids.shape[1] > len(kit.PROMPT) + 5:
            raise OSError("the line is cut")
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("failing", ["streamer", "criterion"])
def test_graphs_come_back_from_a_call_that_fails(failing: str, made: list[CompiledRounds]) -> None:
    engine = compiled()
    arguments: dict[str, Any] = {"streamer": Raises()} if failing == "streamer" else {"stopping_criteria": [Fails()]}
    with pytest.raises(OSError, match="the line is cut"):
        engine.generate(kit.prompt_tensor(), max_new_tokens=NEW, **arguments)
    for _ in range(2):
        assert engine.generate(kit.prompt_tensor(), max_new_tokens=NEW).new_token_ids == [answer()]
    assert len(made) == 1


def test_graphs_come_back_from_a_stream_that_is_closed(made: list[CompiledRounds]) -> None:
    engine = compiled()
    stream = cast(Any, engine.stream(kit.prompt_tensor(), max_new_tokens=NEW))
    next(stream), next(stream)
    stream.close()
    assert engine.generate(kit.prompt_tensor(), max_new_tokens=NEW).new_token_ids == [answer()]
    assert len(made) == 1


def test_graphs_come_back_from_prefill_that_fails(made: list[CompiledRounds]) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of order")

    engine = compiled()
    handle = kit.layers_of(engine.model)[3].register_forward_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of order"):
            engine.generate(kit.prompt_tensor(), max_new_tokens=NEW)
    finally:
        handle.remove()
    assert engine.generate(kit.prompt_tensor(), max_new_tokens=NEW).new_token_ids == [answer()]
    assert len(made) == 1


class CallsAgain(BaseStreamer):
    """A streamer that runs another call of the same kind whenever it gets something, and at the end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def put(self, value: torch.Tensor) -> None:
        self.engine.generate(kit.prompt_tensor(kit.PROMPT[::-1]), max_new_tokens=8)

    def end(self) -> None:
        self.put(torch.empty(0))


def test_what_a_call_hands_back_is_its_own(made: list[CompiledRounds]) -> None:
    """Graphs go back once the result no longer needs their cache."""
    engine = compiled()
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=8, return_cache=True, streamer=CallsAgain(engine))
    prompt = torch.cat([first.sequences, USER_TURN], 1)
    second = engine.generate(prompt, max_new_tokens=8, cache=first.cache)
    assert torch.equal(second.sequences, kit.reference(model_of("mixed"), prompt, 8))
    assert len(made) == 2


# The hook


def test_one_function_for_generate_compiles_once(made: list[CompiledRounds]) -> None:
    model = model_of("mixed")
    decode = layerskip.self_speculative(exit_layer=kit.EXIT_LAYER, num_draft_tokens=GAMMA, compile=True)
    seconds = []
    for prompt in (kit.PROMPT, kit.PROMPT[:4]):
        ids = kit.prompt_tensor(prompt)
        output = model.generate(
            ids, custom_generate=decode, max_new_tokens=NEW, pad_token_id=0, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, kit.reference(model, ids, NEW))
        seconds.append(output.statistics.compile_seconds)
    assert len(made) == 1
    assert seconds[0] > 0.0 == seconds[1]


def test_a_turn_through_the_hook_goes_on_from_a_dynamic_cache(made: list[CompiledRounds]) -> None:
    model = model_of("gemma2")
    decode = layerskip.self_speculative(exit_layer=kit.EXIT_LAYER, num_draft_tokens=GAMMA, compile=True)
    settings = {"custom_generate": decode, "return_dict_in_generate": True, "pad_token_id": 0, "max_new_tokens": 8}
    first = model.generate(kit.prompt_tensor(), **settings)
    prompt = torch.cat([first.sequences, USER_TURN], 1)
    second = model.generate(prompt, cache=first.cache, **settings)
    assert torch.equal(second.sequences, kit.reference(model, prompt, 8))
    assert len(made) == 1
