"""Rows as token ids and labels: every shape, one BOS, an EOS that counts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from layerskip.training.rows import BlockTokenizer, Packer, RowTokenizer, find_columns
from tests import kit

BOS, EOS, USER, ASSISTANT = 80, 81, 82, 83
# <role> content w81, and after the last message the role that is to answer. No {% generation %} marker.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    " {{ 'w82' if message['role'] == 'user' else 'w83' }} {{ message['content'] }} w81"
    "{% endfor %}{% if add_generation_prompt %} w83{% endif %}"
)
# Leaves out what all but the last message say, as templates do with thoughts.
FORGETFUL = (
    "{% for message in messages %} {{ 'w82' if message['role'] == 'user' else 'w83' }}"
    "{% if loop.last or message['role'] == 'user' %} {{ message['content'] }}{% endif %} w81{% endfor %}"
    "{% if add_generation_prompt %} w83{% endif %}"
)
# Writes nothing in front of an answer but before generation.
THINKING = TEMPLATE.replace("%} w83{%", "%} w83 w9{%")
REFUSING = "{{ raise_exception('roles must alternate') }}"


def tokenizer(template: str | None = TEMPLATE, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Returns one with BOS w80, EOS w81 and, for texts, a BOS that it adds."""
    made = kit.word_tokenizer()
    made.add_special_tokens({"bos_token": "w80", "eos_token": "w81"})
    if adds_bos:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single="w80 $A", pair="w80 $A $B", special_tokens=[("w80", BOS)]
        )
    made.chat_template = template
    made.name_or_path = "some/model"
    return made


def tokenise(
    row: dict[str, Any],
    completion_only: bool | None = None,
    max_length: int = 100,
    **changes: Any,
) -> tuple[list[int], list[int]]:
    """Returns the ids and labels of a row."""
    tokenised = RowTokenizer(tokenizer(**changes), completion_only, max_length)(row)
    return tokenised["input_ids"], tokenised["labels"]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


CHAT = [user("w1"), assistant("w2 w3"), user("w4"), assistant("w5")]
CHAT_IDS = [BOS, USER, 1, EOS, ASSISTANT, 2, 3, EOS, USER, 4, EOS, ASSISTANT, 5, EOS]
PROMPT = [user("w1")]
PROMPT_IDS = [BOS, USER, 1, EOS, ASSISTANT]


# Shapes


def test_a_text_counts_but_for_its_first_token_and_ends_with_eos() -> None:
    assert tokenise({"text": "w1 w2"}) == ([BOS, 1, 2, EOS], [-100, 1, 2, EOS])


def test_of_strings_the_completion_counts() -> None:
    ids, labels = tokenise({"prompt": "w1 w2", "completion": "w3 w4"})
    assert (ids, labels) == ([BOS, 1, 2, 3, 4, EOS], [-100, -100, -100, 3, 4, EOS])


def test_the_prompt_counts_when_completion_only_is_off() -> None:
    _, labels = tokenise({"prompt": "w1 w2", "completion": "w3"}, completion_only=False)
    assert labels == [-100, 1, 2, 3, EOS]


def test_of_messages_everything_counts() -> None:
    assert tokenise({"messages": CHAT}) == (CHAT_IDS, [-100, *CHAT_IDS[1:]])


def test_of_messages_the_assistants_turns_count_on_wish_without_a_generation_marker() -> None:
    ids, labels = tokenise({"messages": CHAT}, completion_only=True)
    assert ids == CHAT_IDS
    assert labels == [*[-100] * 5, 2, 3, EOS, *[-100] * 4, 5, EOS]


def test_messages_without_an_assistant_have_nothing_that_counts_on_wish() -> None:
    assert set(tokenise({"messages": PROMPT}, completion_only=True)[1]) == {-100}


def test_of_prompt_and_completion_as_messages_the_completion_counts() -> None:
    ids, labels = tokenise({"prompt": PROMPT, "completion": [assistant("w2 w3")]})
    assert (ids, labels) == ([*PROMPT_IDS, 2, 3, EOS], [*[-100] * 5, 2, 3, EOS])


def test_a_string_completes_messages_as_generation_would() -> None:
    ids, labels = tokenise({"prompt": PROMPT, "completion": "w2 w3"})
    generated_from = tokenizer().apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)
    assert generated_from == PROMPT_IDS
    assert (ids, labels) == ([*PROMPT_IDS, 2, 3, EOS], [*[-100] * 5, 2, 3, EOS])


def test_an_empty_completion_is_an_end() -> None:
    assert tokenise({"prompt": "w1", "completion": ""}) == ([BOS, 1, EOS], [-100, -100, EOS])


def test_a_blank_text_is_nothing() -> None:
    assert tokenise({"text": " \n"}) == ([], [])


# BOS and EOS


@pytest.mark.parametrize("text", ["w1", "w80 w1"])
def test_a_text_gets_one_bos(text: str) -> None:
    assert tokenise({"text": text})[0] == [BOS, 1, EOS]


def test_a_tokenizer_that_adds_no_bos_is_left_alone() -> None:
    assert tokenise({"text": "w1"}, adds_bos=False)[0] == [1, EOS]


def test_a_prompt_gets_one_bos_and_its_completion_none() -> None:
    assert tokenise({"prompt": "w80 w1", "completion": "w2"})[0] == [BOS, 1, 2, EOS]


@pytest.mark.parametrize(
    "row",
    [{"messages": CHAT}, {"prompt": PROMPT, "completion": "w2"}, {"prompt": PROMPT, "completion": [assistant("w2")]}],
    ids=["messages", "mixed", "both"],
)
@pytest.mark.parametrize("template", [TEMPLATE, "{{ bos_token }} " + TEMPLATE], ids=["once", "twice"])
def test_messages_get_one_bos_however_often_it_is_added(row: dict[str, Any], template: str) -> None:
    ids, _ = tokenise(row, template=template)
    assert ids[0] == BOS and ids.count(BOS) == 1


def test_a_second_bos_does_not_shift_the_labels() -> None:
    plain = tokenise({"messages": CHAT}, completion_only=True)
    assert tokenise({"messages": CHAT}, completion_only=True, template="{{ bos_token }} " + TEMPLATE) == plain


@pytest.mark.parametrize("row", [{"text": "w1 w81"}, {"prompt": "w1", "completion": "w81"}], ids=["text", "completion"])
def test_an_eos_that_is_written_out_is_not_added_again(row: dict[str, Any]) -> None:
    assert tokenise(row)[0] == [BOS, 1, EOS]


@pytest.mark.parametrize("prompt", ["w1", PROMPT], ids=["string", "messages"])
def test_an_answer_that_was_cut_gets_no_eos(prompt: Any) -> None:
    ids, labels = tokenise({"prompt": prompt, "completion": "w2 w3", "finish_reason": "length"})
    assert ids[-2:] == labels[-2:] == [2, 3]


@pytest.mark.parametrize("reason", ["stop", None])
def test_an_answer_that_ended_gets_an_eos(reason: str | None) -> None:
    assert tokenise({"prompt": "w1", "completion": "w2", "finish_reason": reason})[0][-1] == EOS


def test_a_long_row_is_cut_at_the_end() -> None:
    assert tokenise({"prompt": "w1", "completion": "w2 w3"}, max_length=3) == ([BOS, 1, 2], [-100, -100, 2])


# What is refused


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": None}, "text is missing; it must be a string"),
        ({"text": 5}, "text is 5 of type int; it must be a string"),
        ({"prompt": None, "completion": "w1"}, "prompt is missing; it must be a string or a list of messages"),
        ({"prompt": "w1", "completion": None}, "completion is missing; it must be a string or a list of messages"),
        ({"prompt": "w1", "completion": [assistant("w2")]}, "write both as messages"),
        ({"messages": "w1"}, "messages is 'w1' of type str; it must be a list of messages"),
        ({"messages": []}, "messages is an empty list; it must hold at least one message"),
        ({"messages": ["w1"]}, r"messages\[0\] is 'w1' of type str; it must be \{'role': …, 'content': …\}"),
        ({"messages": [user("w1"), {"role": "assistant"}]}, r"messages\[1\] has no 'content' that is a string"),
        ({"messages": [{"content": "w1"}]}, r"messages\[0\] has no 'role' that is a string"),
        (
            {"messages": [user("w1"), {"role": "assistant", "content": None}]},
            r"messages\[1\] has no 'content' that is a string",
        ),
        ({"messages": CHAT, "finish_reason": "length"}, "write the unfinished answer as a completion that is a string"),
        (
            {"prompt": PROMPT, "completion": [assistant("w2")], "finish_reason": "length"},
            "finish_reason='length', but a chat template ends every message",
        ),
    ],
)
def test_a_bad_row_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenise(row)


def test_a_text_has_no_completion() -> None:
    with pytest.raises(ValueError, match="completion_only=True, but in a text nothing is a completion"):
        tokenise({"text": "w1"}, completion_only=True)


def test_the_first_message_cannot_be_an_answer() -> None:
    with pytest.raises(ValueError, match=r"messages\[0\] is the assistant's, so it answers nothing"):
        tokenise({"messages": [assistant("w1")]}, completion_only=True)


@pytest.mark.parametrize("template", [FORGETFUL, THINKING], ids=["forgetful", "thinking"])
def test_answers_that_cannot_be_told_apart_are_refused(template: str) -> None:
    message = r"template of 'some/model' writes the messages up to messages\[1\] differently .* completion_only=False"
    with pytest.raises(ValueError, match=message):
        tokenise({"messages": CHAT}, completion_only=True, template=template)


def test_such_a_template_serves_where_everything_counts() -> None:
    ids, labels = tokenise({"messages": CHAT}, template=FORGETFUL)
    assert labels[1:] == ids[1:]


def test_a_template_that_changes_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'some/model' writes the prompt differently .* completion as a string"):
        tokenise({"prompt": PROMPT, "completion": [assistant("w2")]}, template=THINKING)


def test_a_string_completes_what_such_a_template_writes() -> None:
    assert tokenise({"prompt": PROMPT, "completion": "w2"}, template=THINKING)[0] == [*PROMPT_IDS, 9, 2, EOS]


@pytest.mark.parametrize("row", [{"messages": CHAT}, {"prompt": PROMPT, "completion": "w2"}], ids=["messages", "mixed"])
def test_messages_need_a_chat_template(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tokenizer of 'some/model' has no chat template for messages; set"):
        tokenise(row, template=None)


def test_what_a_chat_template_refuses_is_said() -> None:
    with pytest.raises(ValueError, match="template of 'some/model' refuses the messages: roles must alternate"):
        tokenise({"messages": CHAT}, template=REFUSING)


# Blocks


def test_rows_in_which_nothing_counts_are_dropped() -> None:
    tokenise_block = BlockTokenizer(RowTokenizer(tokenizer(), None, 3), {"prompt": "q", "completion": "a"}, "data")
    kept = tokenise_block({"q": ["w1 w2 w3", "w4"], "a": ["w5", "w6"]}, [0, 1])
    assert kept == {"input_ids": [[BOS, 4, 6]], "labels": [[-100, -100, 6]]}


def test_a_row_is_guarded_unless_it_says_otherwise() -> None:
    columns = {"text": "text", "guard": "guard"}
    tokenise_block = BlockTokenizer(RowTokenizer(tokenizer(), None, 9), columns, "data")
    kept = tokenise_block({"text": ["w1 w2", "w3", "w4"], "guard": [False, True, None]}, [0, 1, 2])
    assert kept["guard"] == [[0, 0, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert [len(ids) for ids in kept["input_ids"]] == [4, 3, 3]


def test_a_guard_that_is_no_truth_value_is_refused() -> None:
    tokenise_block = BlockTokenizer(RowTokenizer(tokenizer(), None, 9), {"text": "text", "guard": "guard"}, "data")
    with pytest.raises(ValueError, match=r"^row 1 of data: guard is 'no' of type str; it must be true or false"):
        tokenise_block({"text": ["w1"], "guard": ["no"]}, [0])


def test_a_bad_row_is_named_by_its_number() -> None:
    tokenise_block = BlockTokenizer(RowTokenizer(tokenizer(), None, 9), {"text": "text"}, "train='x'", first_row=10)
    with pytest.raises(ValueError, match=r"^row 17 of train='x': text is missing"):
        tokenise_block({"text": ["w1", None]}, [5, 6])


# Columns


@pytest.mark.parametrize(
    ("found", "renamed", "columns"),
    [
        (["id", "text"], {}, {"text": "text"}),
        (["messages"], {}, {"messages": "messages"}),
        (["prompt", "completion"], {}, {"prompt": "prompt", "completion": "completion"}),
        (["prompt", "messages"], {}, {"messages": "messages"}),
        (
            ["q", "completion", "finish_reason"],
            {"prompt": "q"},
            {"prompt": "q", "completion": "completion", "finish_reason": "finish_reason"},
        ),
        (["text", "end"], {"finish_reason": "end"}, {"text": "text", "finish_reason": "end"}),
        (["text", "guard"], {}, {"text": "text", "guard": "guard"}),
        (["text", "messages"], {"messages": "messages"}, {"messages": "messages"}),
    ],
)
def test_columns_are_found(found: list[str], renamed: dict[str, str], columns: dict[str, str]) -> None:
    assert find_columns("data", found, renamed) == columns


@pytest.mark.parametrize(
    ("found", "renamed"),
    [
        (["question", "answer"], {}),
        (["prompt"], {}),
        (["question", "messages"], {"prompt": "question"}),
        (["text"], {"finish_reason": "end"}),
        (["question", "text"], {"prompt": "question", "text": "text"}),
    ],
)
def test_columns_that_make_no_row_are_refused(found: list[str], renamed: dict[str, str]) -> None:
    message = (
        f"data has the columns {', '.join(found)}; accepted are text, or messages, or prompt and completion.*columns"
    )
    with pytest.raises(ValueError, match=message):
        find_columns("data", found, renamed)


def test_columns_of_several_kinds_of_rows_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"of which several make a row.* Choose one by columns, such as \{text: text\}"
    ):
        find_columns("data", ["text", "messages"], {})


# Packing


def test_rows_are_packed_whole_and_in_order() -> None:
    rows = [[1, 2], [3, 4, 5], [6, 7], [8]]
    packed = Packer(5)({"input_ids": rows, "labels": [[-100, *row[1:]] for row in rows]})
    assert packed == {
        "input_ids": [[1, 2, 3, 4, 5], [6, 7, 8]],
        "labels": [[-100, 2, -100, 4, 5], [-100, 7, -100]],
        "position_ids": [[0, 1, 0, 1, 2], [0, 1, 0]],
    }


def test_what_is_guarded_is_packed_along() -> None:
    rows = [[1, 2], [3], [4, 5]]
    packed = Packer(3)({"input_ids": rows, "labels": rows, "guard": [[0, 0], [1], [1, 1]]})
    assert packed["guard"] == [[0, 0, 1], [1, 1]]
