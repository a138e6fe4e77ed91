"""Files of prompts."""

from __future__ import annotations

import json

import pytest

from graphkit.cli.exits import UsageError
from graphkit.cli.generate_texts import read_prompt_file


@pytest.mark.parametrize(
    ("data", "prompts"),
    [
        (b"a\nb c\n", ["a", "b c"]),
        (b"a\r\n\n  \n b", ["a", " b"]),
        ("é\u2028é".encode(), ["é\u2028é"]),
        (b"\xff", ["\udcff"]),
        (b'{"prompt": "a\\nb", "id": 3}\n\n{"prompt": ""}\n', ["a\nb", ""]),
        (b'{"text": "a"}\n["prompt"]', ['{"text": "a"}', '["prompt"]']),
        (b"[" * 100_000, ["[" * 100_000]),
    ],
)
def test_a_line_is_a_prompt_or_a_json_object(tmp_path, data, prompts):
    file = tmp_path / "prompts"
    file.write_bytes(data)
    assert [prompt.text for prompt in read_prompt_file(file)] == prompts


def test_a_line_of_json_has_an_id_a_chat_and_settings(tmp_path):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    lines = [
        {"prompt": "a", "id": "x", "stop": "b", "temperature": 0.5},
        {"messages": messages, "stop": ["c", "d"]},
    ]
    file = tmp_path / "prompts"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = read_prompt_file(file)
    assert (first.text, first.id, first.stop) == ("a", "x", ("b",))
    assert (first.settings, first.messages) == ({"temperature": 0.5}, None)
    assert (second.text, second.id, second.stop) == ("Hi", 3, ("c", "d"))
    assert (second.settings, second.messages) == ({}, messages)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b'{"promt": "a"}\n{"prompt": "b"}', "line 1 of .* is not a JSON object with a prompt"),
        (b'{"prompt": "a"\n{"prompt": "b"}', "line 1 of .* is not a JSON object with a prompt"),
        (b'{"prompt": 3}', "line 1 of .* is not a JSON object with a prompt"),
        (b'{"messages": null}', "line 1 of .* is not a JSON object with a prompt"),
        (b'{"prompt": "a"}\n\nb\n', "line 3 of .* is not a JSON object with a prompt"),
        (b'{"prompt": "a"}\n{"prompt": 3}', "line 2 of .* is not a JSON object with a prompt"),
        (b'{"prompt": "a"}\n{"messages": []}', "line 2 of .* is not a JSON object with a prompt"),
        (
            b'{"prompt": "a"}\n{"prompt": "a", "messages": [{}]}',
            "line 2 of .* is not a JSON object with a prompt",
        ),
        (b'{"prompt": "a", "stop": [""]}', "line 1 of .*: stop must be a string or a list"),
        (b'{"prompt": "a", "stop": 3}', "line 1 of .*: stop must be a string or a list"),
    ],
)
def test_other_files_are_refused(tmp_path, data, reason):
    file = tmp_path / "prompts"
    file.write_bytes(data)
    with pytest.raises(UsageError, match=reason):
        read_prompt_file(file)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read the prompts in .*: Is a directory"):
        read_prompt_file(tmp_path)
    with pytest.raises(UsageError, match=r"cannot read the prompts in .*null"):
        read_prompt_file(tmp_path / "\0")
