"""Streamers, tokenizers and stop strings of the hook."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import layerskip
from tests import kit
from tests.decoding.hook_kit import (
    MASK,
    NEW,
    PADDED,
    graded,
    hook,
    ours,
    plain,
    refused,
)


class Puts(BaseStreamer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ends = 0

    @property
    def token_ids(self) -> list[int]:
        """All that it got, in one row."""
        return list(chain.from_iterable(self.puts))

    def put(self, value: torch.Tensor) -> None:
        """Keeps a block."""
        assert self.ends == 0
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        """Counts an end."""
        self.ends += 1


def test_a_streamer_gets_the_prompt_and_a_put_a_round(model: PreTrainedModel) -> None:
    streamed = Puts()
    output = model.generate(
        kit.prompt_tensor(),
        custom_generate=hook(streamer=streamed),
        max_new_tokens=NEW,
        return_dict_in_generate=True,
    )
    expected = Puts()
    plain(model, kit.prompt_tensor(), max_new_tokens=NEW, streamer=expected)
    assert streamed.token_ids == output.sequences[0].tolist() == expected.token_ids
    assert streamed.puts[0] == expected.puts[0] == kit.PROMPT
    # The prompt, prefill's token, and the rounds.
    assert len(streamed.puts) == 2 + output.statistics.rounds
    assert streamed.ends == expected.ends == 1


def test_nothing_is_streamed_past_an_eos() -> None:
    model = graded("llama", "all")
    emitted = plain(model, kit.prompt_tensor(), max_new_tokens=8)[0, 10:].tolist()
    streamed = Puts()
    model.generate(
        kit.prompt_tensor(), custom_generate=hook(streamer=streamed), max_new_tokens=8, eos_token_id=emitted[3]
    )
    assert streamed.token_ids == kit.PROMPT + emitted[:4]


def test_transformers_own_streamer_gives_the_same_text(llama: PreTrainedModel) -> None:
    tokenizer = kit.word_tokenizer(kit.VOCAB)
    streamers = [TextIteratorStreamer(tokenizer, skip_prompt=skip) for skip in (True, False)]
    for skip, streamer in zip((True, False), streamers, strict=True):
        expected = TextIteratorStreamer(tokenizer, skip_prompt=skip)
        plain(llama, kit.prompt_tensor(), max_new_tokens=NEW, streamer=expected)
        llama.generate(kit.prompt_tensor(), custom_generate=hook(streamer=streamer), max_new_tokens=NEW)
        assert "".join(streamer) == "".join(expected) != ""


def test_a_streamer_given_to_generate_gets_the_prompt_alone(llama: PreTrainedModel) -> None:
    streamed = Puts()
    given = ours(llama, kit.prompt_tensor(), max_new_tokens=8, streamer=streamed)
    assert streamed.puts == [kit.PROMPT]
    assert streamed.ends == 0
    assert torch.equal(given, plain(llama, kit.prompt_tensor(), max_new_tokens=8))


def test_other_arguments_that_generate_keeps_have_no_effect(llama: PreTrainedModel) -> None:
    expected = plain(llama, kit.prompt_tensor(), max_new_tokens=8)
    for arguments in ({"tokenizer": kit.word_tokenizer()}, {"assistant_model": llama}, {"synced_gpus": False}):
        assert torch.equal(ours(llama, kit.prompt_tensor(), max_new_tokens=8, **arguments), expected)


def test_a_streamer_is_for_one_row(llama: PreTrainedModel) -> None:
    streamed = Puts()
    arguments = {"attention_mask": MASK}
    refused(llama, arguments, ValueError, "streamer takes the tokens of one row", PADDED, hook(streamer=streamed))
    assert streamed.puts == []


class ThirdPutRaises(Puts):
    """Gives up on the third block."""

    def put(self, value: torch.Tensor) -> None:
        """Keeps a block, or raises."""
        if len(self.puts) == 2:
            raise ConnectionError("the client is gone")
        super().put(value)


def test_a_streamer_that_raises_leaves_everything_as_it_was() -> None:
    model = graded("gemma2")
    config = copy.deepcopy(model.config.to_dict())
    modules = list(map(id, model.modules()))
    expected = plain(model, kit.prompt_tensor(), max_new_tokens=NEW)
    with pytest.raises(ConnectionError, match="the client is gone"):
        model.generate(kit.prompt_tensor(), custom_generate=hook(streamer=ThirdPutRaises()), max_new_tokens=NEW)
    assert model.config.to_dict() == config
    assert list(map(id, model.modules())) == modules
    assert torch.equal(ours(model, kit.prompt_tensor(), max_new_tokens=NEW), expected)


def spaced_tokenizer(words: int = kit.VOCAB) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of words, w1, w2, …, that stop strings can be looked for with: it knows "abcdef"."""
    vocabulary = {"abcdef": 0, **{f"w{token}": token for token in range(1, words)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="abcdef"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="abcdef")


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("grade", ["some", "all"])
def test_stop_strings_end_a_row_where_generate_ends_it(grade: str, index: int) -> None:
    model, tokenizer = graded("llama", grade), spaced_tokenizer()
    emitted = plain(model, kit.prompt_tensor(), max_new_tokens=8)[0, 10:].tolist()
    word, following = tokenizer.convert_ids_to_tokens(emitted[index : index + 2])
    for stop_strings in (word, ["nothing", word], f"{word} {following}"):
        options = {"max_new_tokens": NEW, "pad_token_id": 0}
        expected = plain(model, kit.prompt_tensor(), stop_strings=stop_strings, tokenizer=tokenizer, **options)
        output = model.generate(
            kit.prompt_tensor(),
            custom_generate=hook(stop_strings=stop_strings, tokenizer=tokenizer),
            return_dict_in_generate=True,
            **options,
        )
        assert torch.equal(output.sequences, expected)
        assert expected.shape[1] < 10 + NEW
        assert output.finish_reasons == ["stop"]


def test_stop_strings_end_the_rows_of_a_batch_one_by_one(llama: PreTrainedModel) -> None:
    tokenizer = spaced_tokenizer()
    options = {"attention_mask": MASK, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": 96}
    emitted = plain(llama, PADDED, **options)[:, 10:]
    stop_strings = tokenizer.convert_ids_to_tokens([int(emitted[0, 2]), int(emitted[1, 5])])
    expected = plain(llama, PADDED, stop_strings=stop_strings, tokenizer=tokenizer, **options)
    decode = hook(stop_strings=stop_strings, tokenizer=tokenizer)
    assert torch.equal(llama.generate(PADDED, custom_generate=decode, **options), expected)


def test_stop_strings_without_a_tokenizer_are_refused_as_the_hook_is_made() -> None:
    with pytest.raises(ValueError, match=r"stop_strings='w5' need a tokenizer.*pass tokenizer="):
        layerskip.self_speculative(exit_layer=2, stop_strings="w5")


def test_stop_strings_given_to_generate_raise_for_want_of_the_tokenizer(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        ours(llama, kit.prompt_tensor(), max_new_tokens=4, stop_strings="w5", tokenizer=kit.word_tokenizer())


def test_empty_stop_strings_are_refused_before_any_layer_runs(llama: PreTrainedModel) -> None:
    for stop_strings in ("", [], ["w5", ""]):
        decode = hook(stop_strings=stop_strings, tokenizer=kit.word_tokenizer())
        refused(llama, {}, ValueError, "stop_strings=", decode=decode)


def test_a_tokenizer_smaller_than_the_vocabulary_changes_nothing(llama: PreTrainedModel) -> None:
    decode = hook(tokenizer=spaced_tokenizer(90), stop_strings="w1 w2 w3")
    given = llama.generate(kit.prompt_tensor(), custom_generate=decode, max_new_tokens=24, pad_token_id=0)
    assert max(given[0].tolist()) >= 90
    assert torch.equal(given, plain(llama, kit.prompt_tensor(), max_new_tokens=24))
