"""Files of prompts."""

from __future__ import annotations

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
        (b'{"text": "a"}\n{"prompt": "b"}', ['{"text": "a"}', '{"prompt": "b"}']),
        (b'{"prompt": 3}', ['{"prompt": 3}']),
        (b"[" * 100_000, ["[" * 100_000]),
    ],
)
def test_a_line_is_a_prompt_or_a_json_object(tmp_path, data, prompts):
    file = tmp_path / "prompts"
    file.write_bytes(data)
    assert read_prompt_file(file) == prompts


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b'{"prompt": "a"}\n\nb\n', "line 3 of .* is not a JSON object with a prompt"),
        (b'{"prompt": "a"}\n{"prompt": 3}', "line 2 of .* is not a JSON object with a prompt"),
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
