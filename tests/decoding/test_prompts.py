"""Prompts of every kind as token ids, and everything that is none."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BatchEncoding, PreTrainedTokenizerFast

from layerskip import Engine
from layerskip.decoding.prompts import Prompts, longest_first, read_prompts
from tests import kit

BOS, USER, ASSISTANT = 1, 2, 3
TEMPLATE = (
    "<s> {% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [{"role": "user", "content": "w10 w11"}]


@cache
def tokenizer(with_bos: bool = True, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of words w5, w6, … for ids 5, 6, …, which sets a BOS token before a text, or none."""
    special = {"<unk>": 0, "<s>": BOS, "<user>": USER, "<assistant>": ASSISTANT, "<system>": 4}
    words = {f"w{token}": token for token in range(5, kit.VOCAB)}
    backend = Tokenizer(models.WordLevel({**special, **words}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if with_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", pad_token="w96")
    made.chat_template = template
    return made


def rows_of(prompts: Any, mask: Any = None, **arguments: Any) -> list[list[int]]:
    return read_prompts(prompts, tokenizer(**arguments), mask, kit.VOCAB).rows


# Texts


def test_a_string_is_tokenised_as_it_stands() -> None:
    assert rows_of("w10 w11", with_bos=False) == [[10, 11]]


def test_a_string_gets_the_bos_token_that_its_tokenizer_sets() -> None:
    assert rows_of("w10 w11") == [[BOS, 10, 11]]


def test_a_string_is_not_put_through_the_chat_template() -> None:
    assert USER not in rows_of("w10 w11")[0]


def test_a_list_of_strings_is_a_batch() -> None:
    assert rows_of(["w10 w11", "w12"]) == [[BOS, 10, 11], [BOS, 12]]


def test_a_tuple_of_strings_is_a_batch() -> None:
    assert rows_of(("w10 w11", "w12")) == [[BOS, 10, 11], [BOS, 12]]


def test_a_string_of_nothing_but_a_bos_token_is_a_prompt() -> None:
    assert rows_of("") == [[BOS]]


# Messages


def test_messages_go_through_the_chat_template_and_end_where_the_answer_begins() -> None:
    assert rows_of(TALK) == [[BOS, USER, 10, 11, ASSISTANT]]


@pytest.mark.parametrize("with_bos", [True, False])
def test_messages_have_one_bos_token_only(with_bos: bool) -> None:
    """The template writes one, and the tokenizer would set another."""
    (row,) = rows_of(TALK, with_bos=with_bos)
    assert row.count(BOS) == 1


def test_messages_of_several_turns_are_one_prompt() -> None:
    talk = [{"role": "system", "content": "w9"}, *TALK, {"role": "assistant", "content": "w12"}, *TALK]
    assert rows_of(talk) == [[BOS, 4, 9, USER, 10, 11, ASSISTANT, 12, USER, 10, 11, ASSISTANT]]


def test_a_list_of_message_lists_is_a_batch() -> None:
    other = [{"role": "user", "content": "w12"}]
    assert rows_of([TALK, other]) == [[BOS, USER, 10, 11, ASSISTANT], [BOS, USER, 12, ASSISTANT]]


def test_a_batch_may_mix_texts_and_messages() -> None:
    assert rows_of(["w12", TALK]) == [[BOS, 12], [BOS, USER, 10, 11, ASSISTANT]]


def test_messages_without_a_chat_template_are_refused_and_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\] is a list of messages.*no chat template.*pass a string"):
        rows_of(TALK, template=None)


def test_messages_are_left_as_they_were() -> None:
    talk = [dict(message) for message in TALK]
    rows_of(talk)
    assert talk == TALK


# Token ids


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_tensor_is_taken_as_it_is(dtype: torch.dtype) -> None:
    ids = torch.tensor([[10, 11], [12, 13]], dtype=dtype)
    read = read_prompts(ids, None, None, kit.VOCAB)
    assert read.rows == [[10, 11], [12, 13]]
    assert read.padded is ids


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_new_tokens_are_not_cut_to_a_small_type_of_the_prompt(dtype: torch.dtype) -> None:
    model = kit.l4(vocab_size=300)
    expected = kit.reference(model, kit.prompt_tensor())
    assert expected.max() > 255
    result = Engine(model, exit_layer=2).generate(kit.prompt_tensor().to(dtype), max_new_tokens=24)
    assert result.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        ([[0, 0, 10, 11], [12, 13, 14, 15]], [[0, 0, 1, 1], [1, 1, 1, 1]]),
        ([[10, 11, 0, 0], [12, 13, 14, 15]], [[1, 1, 0, 0], [1, 1, 1, 1]]),
        ([[0, 10, 11, 0], [12, 13, 14, 15]], [[0, 1, 1, 0], [1, 1, 1, 1]]),
    ],
    ids=["left", "right", "both sides"],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_padding_is_taken_off_at_either_end(ids: list[list[int]], mask: list[list[int]], dtype: torch.dtype) -> None:
    read = read_prompts(torch.tensor(ids), None, torch.tensor(mask, dtype=dtype), kit.VOCAB)
    assert read.rows == [[10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize(("pad_token_id", "eos_token_id"), [(0, None), (0, 0), (0, 96), (None, None)])
def test_padding_without_a_mask_is_what_generate_takes_it_for(
    pad_token_id: int | None, eos_token_id: int | None
) -> None:
    """A pad token is padding unless it ends texts as well, or is not known at all."""
    model = kit.mixed()
    ids = torch.tensor([[0, 0, 10, 44, 7], [3, 5, 12, 60, 9]])
    options = {"max_new_tokens": 8, "pad_token_id": pad_token_id, "eos_token_id": eos_token_id}
    expected = model.generate(ids, do_sample=False, **options)
    assert torch.equal(Engine(model, exit_layer=2).generate(ids, **options).sequences, expected)


def test_padding_may_hold_ids_outside_the_vocabulary() -> None:
    ids, mask = torch.tensor([[-100, 10, 11]]), torch.tensor([[0, 1, 1]])
    assert read_prompts(ids, None, mask, kit.VOCAB).rows == [[10, 11]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_token_of_the_answer(side: str) -> None:
    model = kit.mixed()
    short = kit.PROMPT[:6]
    padding = [0] * 4
    row, mask = (padding + short, padding + [1] * 6) if side == "left" else (short + padding, [1] * 6 + padding)
    ids = torch.tensor([row, kit.PROMPT])
    engine = Engine(model, exit_layer=2)
    result = engine.generate(ids, attention_mask=torch.tensor([mask, [1] * 10]), max_new_tokens=12)
    assert torch.equal(result.sequences[:, :10], ids)
    alone = kit.reference(model, kit.prompt_tensor(short), 12)[0, 6:]
    assert torch.equal(result.sequences[0, 10:], alone)
    assert torch.equal(result.sequences[1], kit.reference(model, kit.prompt_tensor(), 12)[0])


# What is no prompt


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([1, 2, 3]),
        torch.tensor(5),
        torch.ones(1, 2, 3, dtype=torch.long),
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([[True, False]]),
        torch.tensor([[1 + 2j]]),
    ],
    ids=["one dimension", "no dimension", "three dimensions", "floating point", "bool", "complex"],
)
def test_a_tensor_of_another_shape_or_type_is_refused(ids: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"prompts has shape \(.*\) and type torch\..*; allowed: .*\(batch, tokens\)"):
        read_prompts(ids, None, None, kit.VOCAB)


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        (5, "prompts is a int"),
        (None, "prompts is a NoneType"),
        (b"w10", "prompts is a bytes"),
        ({"role": "user", "content": "w10"}, "prompts is a dict"),
        (numpy.array([[1, 2]]), "prompts is a ndarray"),
        (BatchEncoding({"input_ids": torch.tensor([[1]])}), "prompts is a BatchEncoding"),
        ([1, 2, 3], r"prompts\[0\] is a int"),
        ([[1, 2, 3]], r"prompts\[0\] is a list"),
        (["w10", 5], r"prompts\[1\] is a int"),
        (["w10", None], r"prompts\[1\] is a NoneType"),
        ([TALK, TALK[0]], r"prompts\[1\] is a dict"),
    ],
)
def test_prompts_of_another_kind_are_refused_with_what_is_allowed(prompts: Any, named: str) -> None:
    with pytest.raises(TypeError, match=f"{named}; allowed: a string, a list of messages"):
        rows_of(prompts)


def test_a_generator_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="prompts is a generator; allowed"):
        rows_of(text for text in ["w10"])


@pytest.mark.parametrize("prompts", [[], (), torch.zeros(0, 4, dtype=torch.long)], ids=["list", "tuple", "tensor"])
def test_a_batch_without_prompts_is_refused(prompts: Any) -> None:
    with pytest.raises(ValueError, match="prompts is empty; pass at least one prompt"):
        rows_of(prompts)


@pytest.mark.parametrize(
    ("prompts", "mask", "index"),
    [
        ("", None, 0),
        (["w10", ""], None, 1),
        ([TALK, []], None, 1),
        (torch.zeros(2, 0, dtype=torch.long), None, 0),
        (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 1], [0, 0]]), 1),
    ],
    ids=["text", "text in a batch", "no message", "tensor", "nothing but padding"],
)
def test_an_empty_prompt_is_refused_by_its_index(prompts: Any, mask: torch.Tensor | None, index: int) -> None:
    with pytest.raises(ValueError, match=rf"prompts\[{index}\] is empty; generation needs at least one token"):
        rows_of(prompts, mask, with_bos=False)


@pytest.mark.parametrize("token", [-1, kit.VOCAB, 10**9])
def test_a_token_id_outside_the_vocabulary_is_refused_by_name(token: int) -> None:
    with pytest.raises(ValueError, match=rf"prompts\[1\] holds token id {token}; the model's vocabulary is 0 to 96"):
        read_prompts(torch.tensor([[0, 96], [5, token]]), None, None, kit.VOCAB)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_where_one_is_used() -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\] holds token id 90; the model's vocabulary is 0 to 49"):
        read_prompts("w90", tokenizer(), None, 50)


@pytest.mark.parametrize("prompts", ["w10", ["w10"], TALK, [TALK]])
def test_text_without_a_tokenizer_is_refused_and_says_what_to_do(prompts: Any) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer; pass Engine\(model, tokenizer\) or token ids"):
        read_prompts(prompts, None, None, kit.VOCAB)


@pytest.mark.parametrize("row", [[1, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1]])
def test_a_mask_with_a_hole_is_refused_by_the_index_of_its_row(row: list[int]) -> None:
    mask = torch.tensor([[1, 1, 1, 1], row])
    with pytest.raises(
        ValueError, match=r"attention_mask\[1\] has a zero between ones; padding is allowed at the ends"
    ):
        read_prompts(torch.tensor([[1, 2, 3, 4]] * 2), None, mask, kit.VOCAB)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(1, 3), torch.ones(2, 4), torch.ones(4), torch.ones(1, 1, 4, 4), [[1, 1, 1, 1]], numpy.ones((1, 4))],
    ids=["too short", "too many rows", "one dimension", "four dimensions", "list", "array"],
)
def test_a_mask_of_another_shape_or_kind_is_refused(mask: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=r"attention_mask must be a tensor of the prompts' shape \(1, 4\)"
    ):
        read_prompts(torch.tensor([[1, 2, 3, 4]]), None, mask, kit.VOCAB)


@pytest.mark.parametrize("prompts", ["w10", ["w10"], TALK])
def test_a_mask_beside_texts_is_refused(prompts: Any) -> None:
    with pytest.raises(ValueError, match="attention_mask goes with a tensor of token ids"):
        rows_of(prompts, torch.ones(1, 2))


# As the result returns them


def test_given_token_ids_are_returned_as_they_were_given() -> None:
    ids = torch.tensor([[0, 0, 10, 11]])
    read = read_prompts(ids, None, torch.tensor([[0, 0, 1, 1]]), kit.VOCAB)
    assert read.tensor(None) is ids


def test_texts_are_padded_on_the_left() -> None:
    assert Prompts([[10, 11, 12], [13]]).tensor(96).tolist() == [[10, 11, 12], [96, 96, 13]]


def test_texts_of_one_length_need_no_padding_token() -> None:
    assert Prompts([[10, 11], [12, 13]]).tensor(None).tolist() == [[10, 11], [12, 13]]


def test_texts_of_different_lengths_without_a_padding_token_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="pad_token_id=None, but the prompts have different lengths; pass pad_token_id="
    ):
        Prompts([[10, 11], [12]]).tensor(None)


def test_a_pad_token_within_a_prompt_asks_for_a_mask() -> None:
    model = kit.mixed()
    ids = torch.tensor([[3, 5, 0, 60, 9]])
    engine = Engine(model, exit_layer=2)
    with pytest.raises(ValueError, match=r"prompts\[0\] holds pad_token_id=0 between other tokens.*attention_mask"):
        engine.generate(ids, pad_token_id=0, max_new_tokens=4)
    result = engine.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, max_new_tokens=8)
    assert result.sequences[0, 5:].tolist() == kit.without_cache(model, [3, 5, 0, 60, 9], 8)


def test_bytes_that_are_no_text_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\] holds bytes that are not UTF-8"):
        read_prompts("w1 \udcff", kit.word_tokenizer(), None, kit.VOCAB)


def test_what_a_chat_template_refuses_is_refused_by_name() -> None:
    tokenizer = kit.word_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"prompts\[0\] is refused by the tokenizer's chat template: roles must"):
        read_prompts([{"role": "user", "content": "w1"}], tokenizer, None, kit.VOCAB)


def test_the_longest_rows_come_first_and_those_of_one_length_keep_their_order() -> None:
    assert longest_first([[1], [2, 3], [4], [5, 6, 7], [8, 9]]) == [3, 1, 4, 0, 2]
    assert longest_first([]) == []
