"""Streaming one row: an event for prefill and for every round."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from layerskip import Engine
from tests import kit

WIDTH = len(kit.PROMPT)
# Characters of two, three and four bytes, which begin and end anywhere in a token.
SPELLING = [
    b"a\xc3",
    b"\xa9b",
    b"\xf0",
    b"\x9f\x99",
    b"\x82",
    b"\xe6\x97",
    b"\xa5 ",
    b"\xe2\x82\xac",
    b"x\xc3",
    b"\xbc\xc3",
    b"\x9f!",
]


@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_events_add_up_to_the_result(grade: str) -> None:
    model = kit.graded("llama", grade)
    engine = Engine(model, exit_layer=kit.EXIT_LAYER)
    events = list(engine.stream(kit.prompt_tensor(), max_new_tokens=24))
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24)
    streamed = [token for event in events for token in event.token_ids]
    assert streamed == result.sequences[0, len(kit.PROMPT) :].tolist()
    assert len(events) == 1 + result.statistics.rounds
    accepted = [flag for event in events for flag in event.accepted]
    assert accepted.count(True) == result.statistics.accepted
    assert [event.result is None for event in events] == [True] * (len(events) - 1) + [False]
    final = events[-1].result
    assert final is not None
    assert torch.equal(final.sequences, result.sequences)


def test_every_round_ends_with_the_targets_own_token() -> None:
    events = list(Engine(kit.mixed(), exit_layer=2).stream(kit.prompt_tensor(), max_new_tokens=24))
    assert all(event.accepted == (True,) * (len(event.token_ids) - 1) + (False,) for event in events)


def test_nothing_follows_an_eos() -> None:
    model = kit.identical()
    plain = kit.reference(model, kit.prompt_tensor())[0, len(kit.PROMPT) :].tolist()
    events = list(Engine(model, exit_layer=2).stream(kit.prompt_tensor(), max_new_tokens=24, eos_token_id=plain[3]))
    assert [token for event in events for token in event.token_ids] == plain[:4]
    assert events[-1].accepted[-1] is True


def test_a_consumer_that_gives_up_leaves_the_model_as_it_was() -> None:
    model = kit.mixed()
    expected = kit.reference(model, kit.prompt_tensor())
    config = model.config.to_dict()
    events = Engine(model, exit_layer=2).stream(kit.prompt_tensor(), max_new_tokens=24)
    next(events)
    next(events)
    events.close()
    assert model.config.to_dict() == config
    assert torch.is_grad_enabled()
    assert torch.equal(kit.reference(model, kit.prompt_tensor()), expected)
    assert torch.equal(Engine(model, exit_layer=2).generate(kit.prompt_tensor(), max_new_tokens=24).sequences, expected)


def test_gradients_are_on_for_the_consumer_between_events() -> None:
    for _ in Engine(kit.mixed(), exit_layer=2).stream(kit.prompt_tensor(), max_new_tokens=6):
        assert torch.is_grad_enabled()


# Text


@cache
def graded(grade: str) -> PreTrainedModel:
    """A Llama of known acceptance; no test changes it."""
    return kit.graded("llama", grade)


@cache
def spelled_model(grade: str) -> tuple[PreTrainedModel, tuple[int, ...], PreTrainedTokenizerFast]:
    """Returns a model, what it says, and a tokenizer that makes text of it whose characters go over many tokens."""
    tokens = tuple(kit.reference(graded(grade), kit.prompt_tensor())[0, WIDTH:].tolist())
    return graded(grade), tokens, kit.spelled(dict(zip(dict.fromkeys(tokens), SPELLING, strict=False)))


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("grade", ["some", "all"])
def test_no_event_ends_within_a_character(grade: str, num_draft_tokens: int) -> None:
    model, plain, tokenizer = spelled_model(grade)
    engine = Engine(model, tokenizer, exit_layer=2, num_draft_tokens=num_draft_tokens)
    texts = [event.text for event in engine.stream(kit.prompt_tensor(), max_new_tokens=len(SPELLING))]
    assert "".join(texts) == b"".join(SPELLING).decode() == tokenizer.decode(list(plain[: len(SPELLING)]))
    assert not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("budget", range(1, 12))
@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_texts_add_up_also_where_the_last_character_stays_unfinished(grade: str, budget: int) -> None:
    model, plain, tokenizer = spelled_model(grade)
    events = list(Engine(model, tokenizer, exit_layer=2).stream(kit.prompt_tensor(), max_new_tokens=budget))
    result = events[-1].result
    assert result is not None
    assert result.texts == ["".join(event.text for event in events)] == [tokenizer.decode(list(plain[:budget]))]


@pytest.mark.parametrize("end", range(1, 10))
@pytest.mark.parametrize("grade", ["some", "all"])
def test_a_stop_string_ends_the_stream_and_its_text(grade: str, end: int) -> None:
    """The string is the last three characters of the first tokens, which may end within the next character."""
    model, _, tokenizer = spelled_model(grade)
    stop = b"".join(SPELLING[: end + 1]).decode(errors="ignore")[-3:]
    engine = Engine(model, tokenizer, exit_layer=2)
    options = {"max_new_tokens": len(SPELLING), "stop_strings": stop}
    expected = kit.reference(model, kit.prompt_tensor(), tokenizer=tokenizer, **options)[0, WIDTH:].tolist()
    events = list(engine.stream(kit.prompt_tensor(), **options))
    result = events[-1].result
    assert result is not None
    assert [token for event in events for token in event.token_ids] == expected == result.new_token_ids[0]
    assert result.texts == ["".join(event.text for event in events)]
    assert stop in result.texts[0]
    assert result.finish_reasons == ["stop"]
    assert sum(flag for event in events for flag in event.accepted) == result.statistics.accepted


@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_a_sampled_stream_is_what_generate_gives_with_the_same_generator(grade: str) -> None:
    model, _, tokenizer = spelled_model(grade)
    engine = Engine(model, tokenizer, exit_layer=2)
    for seed in range(5):
        options = {"max_new_tokens": 16, "do_sample": True, "temperature": 2.0, "eos_token_id": 84}
        result = engine.generate(kit.prompt_tensor(), generator=torch.Generator().manual_seed(seed), **options)
        events = list(engine.stream(kit.prompt_tensor(), generator=torch.Generator().manual_seed(seed), **options))
        streamed = [token for event in events for token in event.token_ids]
        assert [streamed] == result.new_token_ids
        assert ["".join(event.text for event in events)] == result.texts
        assert 84 not in streamed[:-1]
        assert len(events) == 1 + result.statistics.rounds
        flags = [flag for event in events for flag in event.accepted]
        assert (len(flags), sum(flags)) == (len(streamed), result.statistics.accepted)


def test_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="stream takes one prompt and gives one row, not 2"):
        Engine(graded("some"), exit_layer=2).stream(kit.prompt_tensor().repeat(2, 1), max_new_tokens=4)


def test_several_sequences_of_one_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="stream takes one prompt and gives one row, not 2"):
        Engine(graded("some"), exit_layer=2).stream(
            kit.prompt_tensor(), max_new_tokens=4, do_sample=True, num_return_sequences=2
        )


# Streamers of transformers


class Recorder(BaseStreamer):
    """Keeps what it is given, and how often it was told of the end."""

    def __init__(self) -> None:
        self.puts: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.ends == 0
        assert value.device.type == "cpu"
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1


class Failing(Recorder):
    """Fails when it is given something for the third time."""

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.puts) == 3:
            raise ConnectionError("the reader is gone")


@pytest.mark.parametrize("eos", [None, 3, 6])
@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_a_streamer_gets_the_prompt_and_then_each_round_at_once(grade: str, eos: int | None) -> None:
    model, plain, _ = spelled_model(grade)
    options = {} if eos is None else {"eos_token_id": plain[eos]}
    streamer = Recorder()
    engine = Engine(model, exit_layer=2)
    result = engine.generate(kit.prompt_tensor(), max_new_tokens=24, pad_token_id=0, streamer=streamer, **options)
    assert streamer.ends == 1
    assert torch.equal(streamer.puts[0], kit.prompt_tensor())
    assert torch.equal(torch.cat([put.flatten() for put in streamer.puts]), result.sequences[0])
    assert torch.equal(result.sequences, kit.reference(model, kit.prompt_tensor(), **options))
    rounds = [list(event.token_ids) for event in engine.stream(kit.prompt_tensor(), max_new_tokens=24, **options)]
    assert [put.tolist() for put in streamer.puts[1:]] == rounds
    assert len(rounds) == 1 + result.statistics.rounds


@pytest.mark.parametrize("skip_prompt", [True, False])
@pytest.mark.parametrize("grade", ["some", "all"])
def test_a_text_streamer_prints_what_it_prints_in_generate(
    capsys: pytest.CaptureFixture[str], grade: str, skip_prompt: bool
) -> None:
    model, _, tokenizer = spelled_model(grade)
    options = {"max_new_tokens": len(SPELLING), "do_sample": False, "pad_token_id": 0}
    model.generate(kit.prompt_tensor(), streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt), **options)
    expected = capsys.readouterr().out
    streamer = TextStreamer(tokenizer, skip_prompt=skip_prompt)
    Engine(model, tokenizer, exit_layer=2).generate(kit.prompt_tensor(), streamer=streamer, **options)
    assert capsys.readouterr().out == expected
    assert b"".join(SPELLING).decode() in expected


def test_a_text_iterator_streamer_is_read_while_another_thread_generates() -> None:
    model, _, tokenizer = spelled_model("some")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60.0)
    engine = Engine(model, tokenizer, exit_layer=2)
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(engine.generate, kit.prompt_tensor(), max_new_tokens=len(SPELLING), streamer=streamer)
        text = "".join(streamer)
    assert future.result().texts == [text] == [b"".join(SPELLING).decode()]


@pytest.mark.parametrize("grade", ["none", "some", "all"])
def test_a_streamer_that_fails_leaves_everything_as_it_was(grade: str) -> None:
    model = graded(grade)
    expected = kit.reference(model, kit.prompt_tensor())
    config, settings = model.config.to_dict(), model.generation_config.to_dict()
    weights = {name: (id(tensor), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    engine = Engine(model, exit_layer=2)
    streamer = Failing()
    with pytest.raises(ConnectionError, match="the reader is gone"):
        engine.generate(kit.prompt_tensor(), max_new_tokens=24, streamer=streamer)
    assert (len(streamer.puts), streamer.ends) == (3, 0)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, settings)
    assert {name: (id(tensor), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()} == weights
    assert torch.equal(engine.generate(kit.prompt_tensor(), max_new_tokens=24).sequences, expected)
    assert torch.equal(kit.reference(model, kit.prompt_tensor()), expected)


@pytest.mark.parametrize("copies", [{"num_return_sequences": 2, "do_sample": True}, {}], ids=str)
def test_a_streamer_for_several_rows_is_refused_before_it_is_given_anything(copies: dict[str, Any]) -> None:
    ids = kit.prompt_tensor() if copies else kit.prompt_tensor().repeat(2, 1)
    streamer = Recorder()
    with pytest.raises(ValueError, match="streamer takes the tokens of one row, and there are 2"):
        Engine(graded("some"), exit_layer=2).generate(ids, max_new_tokens=4, streamer=streamer, **copies)
    assert (streamer.puts, streamer.ends) == ([], 0)
