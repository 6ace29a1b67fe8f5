"""Text that grows as tokens arrive: the pieces add up, and none ends within a character."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from layerskip.decoding.text import REPLACEMENT, GrowingText

TEXTS = [
    "plain words, and a full stop.",
    "naïve café – über 100 €",
    "🙂 emoji 👩‍👩‍👧 with joiners 🏳️‍🌈!",
    "日本語と한국어 و العربية",
    "  leading and double  spaces\n\tand lines\n",
    "é",
    "🙂",
    "a🙂",
]


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with a token for every byte, some merges, and a special token.

    "é" is two tokens and "🙂" is four, of which two are merged: characters end within and between tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges: list[tuple[str, str]] = []
    tokens = list(alphabet)
    for text in ("th", "the", " t", " a", "an", "🙂"):
        spelled = to_bytes.pre_tokenize_str(text)[0][0]
        first, second = spelled[:-1], spelled[-1]
        if text == "🙂":
            first, second = spelled[0], spelled[1]
        if first in tokens and first + second not in tokens:
            merges.append((first, second))
            tokens.append(first + second)
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = to_bytes
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@cache
def space_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer as Llama 2's: spaces are part of the tokens, and decoding drops a text's first one."""
    words = ["<unk>", "</s>", "▁Hello", "▁world", "▁", "!", "lo", "▁x"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whole words, between which decoding sets a space."""
    words = ["[UNK]", "[SEP]", "it", "is", "well", "."]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", sep_token="[SEP]")


def pieces_of(tokenizer: PreTrainedTokenizerFast, blocks: list[list[int]]) -> list[str]:
    """Returns the piece for every block and, last, what was still held back."""
    text = GrowingText(tokenizer)
    return [text.add(tuple(block)) for block in blocks] + [text.finish()]


def whole(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@st.composite
def blocks_of(draw: st.DrawFn, tokens: st.SearchStrategy[list[int]]) -> list[list[int]]:
    """Draws a list of tokens, split into blocks of one to five."""
    rest = draw(tokens)
    blocks = []
    while rest:
        size = draw(st.integers(1, 5))
        blocks.append(rest[:size])
        rest = rest[size:]
    return blocks


def encoded(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[int]]:
    return text.map(lambda value: list(byte_tokenizer().encode(value, add_special_tokens=False)))


any_text = st.one_of(st.sampled_from(TEXTS), st.text(alphabet="abé🙂日 \n‍", max_size=12), st.text(max_size=12))


def test_the_tokenizer_splits_characters_between_tokens() -> None:
    """A control: without that, the tests below would say nothing."""
    tokens = byte_tokenizer().encode("é", add_special_tokens=False)
    assert len(tokens) == 2
    assert whole(byte_tokenizer(), tokens[:1]) == REPLACEMENT


@given(blocks_of(encoded(any_text)))
def test_pieces_add_up_to_the_whole_text(blocks: list[list[int]]) -> None:
    tokens = [token for block in blocks for token in block]
    assert "".join(pieces_of(byte_tokenizer(), blocks)) == whole(byte_tokenizer(), tokens)


@given(blocks_of(encoded(any_text.filter(lambda text: REPLACEMENT not in text))))
def test_text_is_held_back_while_a_character_is_unfinished_and_no_longer(blocks: list[list[int]]) -> None:
    text = GrowingText(byte_tokenizer())
    shown, tokens = "", []
    for block in blocks:
        piece = text.add(tuple(block))
        assert REPLACEMENT not in piece
        shown += piece
        tokens += block
        so_far = whole(byte_tokenizer(), tokens)
        if not so_far.endswith(REPLACEMENT):
            assert shown == so_far
    assert text.finish() == ""


@given(blocks_of(st.lists(st.integers(0, 261), max_size=20)))
def test_pieces_add_up_even_where_the_tokens_are_no_text(blocks: list[list[int]]) -> None:
    """A model may emit any bytes, and special tokens between them."""
    tokenizer = byte_tokenizer()
    blocks = [[token % len(tokenizer) for token in block] for block in blocks]
    tokens = [token for block in blocks for token in block]
    assert "".join(pieces_of(tokenizer, blocks)) == whole(tokenizer, tokens)


@pytest.mark.parametrize("text", TEXTS)
def test_token_by_token_gives_the_text(text: str) -> None:
    tokens = byte_tokenizer().encode(text, add_special_tokens=False)
    assert "".join(pieces_of(byte_tokenizer(), [[token] for token in tokens])) == text


def test_a_split_character_arrives_with_its_last_token() -> None:
    first, second = byte_tokenizer().encode("é", add_special_tokens=False)
    assert pieces_of(byte_tokenizer(), [[first], [second]]) == ["", "é", ""]


def test_finish_gives_out_an_unfinished_character() -> None:
    tokens = byte_tokenizer().encode("aé", add_special_tokens=False)
    assert pieces_of(byte_tokenizer(), [tokens[:2]]) == ["", "a" + REPLACEMENT]


def test_finish_gives_nothing_where_nothing_is_held_back() -> None:
    tokens = byte_tokenizer().encode("abc", add_special_tokens=False)
    assert pieces_of(byte_tokenizer(), [tokens]) == ["abc", ""]
    assert pieces_of(byte_tokenizer(), []) == [""]


def test_special_tokens_are_left_out() -> None:
    end = byte_tokenizer().eos_token_id
    tokens = byte_tokenizer().encode("ab", add_special_tokens=False)
    assert "".join(pieces_of(byte_tokenizer(), [[tokens[0]], [end], [tokens[1]], [end]])) == "ab"


@example([[2], [1], [3]])
@example([[1], [2]])
@example([[2], [1, 1], [1], [3]])
@given(blocks_of(st.lists(st.integers(0, 7), max_size=12)))
def test_pieces_add_up_where_decoding_drops_a_leading_space(blocks: list[list[int]]) -> None:
    """Only the first token of the whole text loses its space, whatever stands before a block, a special token too."""
    tokens = [token for block in blocks for token in block]
    assert "".join(pieces_of(space_tokenizer(), blocks)) == whole(space_tokenizer(), tokens)


@example([[2], [1], [3]])
@given(blocks_of(st.lists(st.integers(0, 5), max_size=12)))
def test_pieces_add_up_where_decoding_sets_the_spaces(blocks: list[list[int]]) -> None:
    tokens = [token for block in blocks for token in block]
    assert "".join(pieces_of(word_tokenizer(), blocks)) == whole(word_tokenizer(), tokens)


def test_the_cost_of_a_piece_does_not_grow_with_the_text() -> None:
    """Only the tokens of the last pieces are decoded again."""
    tokenizer = byte_tokenizer()
    text = GrowingText(tokenizer)
    (letter,) = tokenizer.encode("x", add_special_tokens=False)
    decoded = []
    plain = text._decode
    text._decode = lambda tokens: decoded.append(len(tokens)) or plain(tokens)  # type: ignore[method-assign,func-returns-value]
    for _ in range(200):
        assert text.add((letter,)) == "x"
    assert max(decoded) <= 2
