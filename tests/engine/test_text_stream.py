"""Streamed text is the decoded text, in whole characters, up to the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from checkpoint_folders import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    continuation,
    write_tokenizer,
)
from graphkit.engine import TextStream
from graphkit.errors import ConfigError
from graphkit.models.tokenizer import ByteTokenizer

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12) | st.text("ab ▁é日🙂\n", max_size=12)
TRAINED = {"byte-level": byte_level_tokenizer, "byte-fallback": byte_fallback_tokenizer}


@pytest.fixture(scope="module", params=TRAINED)
def tokenizer(request, tmp_path_factory):
    hf = pytest.importorskip("graphkit.models")
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, TRAINED[request.param]())
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return hf.FolderTokenizer(folder, 320)


@st.composite
def groups(draw, tokens):
    """Divide a list into consecutive groups, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)))))
    return [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


def pieces_of(stream, tokens):
    return [*(stream.append(group) for group in tokens), stream.finish()]


def without_bos(tokenizer, text):
    return tokenizer.encode(text)[1:]


@given(data=st.data(), prompt=TEXTS, text=TEXTS)
def test_the_pieces_are_the_whole_text_in_whole_characters(tokenizer, data, prompt, text):
    prompt_ids, new_ids = tokenizer.encode(prompt), without_bos(tokenizer, text)
    expected = continuation(tokenizer, prompt_ids, new_ids)
    stream = TextStream(tokenizer, prompt_ids)
    pieces = pieces_of(stream, data.draw(groups(new_ids)))
    assert "".join(pieces) == stream.text == expected
    if "\ufffd" not in text:
        assert "\ufffd" not in stream.text


@given(text=TEXTS)
def test_a_character_appears_with_its_last_token(tokenizer, text):
    """Unless U+FFFD may stand for a character that is not complete."""
    if "\ufffd" in text:
        return
    ids = tokenizer.encode(text)
    stream, whole = TextStream(tokenizer, ids[:1]), tokenizer.decode(ids)
    for end in range(2, len(ids) + 1):
        stream.append(ids[end - 1 : end])
        decoded = tokenizer.decode(ids[:end])
        if whole.startswith(decoded):
            assert stream.text == decoded


@given(data=st.data(), ids=st.lists(st.integers(3, 319), max_size=12))
def test_bytes_that_are_no_character_are_replaced_as_in_one_call(data, ids):
    tokenizer = ByteTokenizer()
    ids = [token % 256 for token in ids]
    stream = TextStream(tokenizer)
    assert "".join(pieces_of(stream, data.draw(groups(ids)))) == tokenizer.decode(ids)


def until_stop(text, stop):
    """Return the text before the stop string that is complete first, character by character."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stop:
                return text[:start]
    return text


@given(data=st.data(), text=st.text("ab é", max_size=14),
       stop=st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3))  # fmt: skip
def test_the_text_ends_before_the_first_stop_string(tokenizer, data, text, stop):
    ids = without_bos(tokenizer, text)
    whole = tokenizer.decode(ids)
    stream, expected, shown = TextStream(tokenizer, (), stop), until_stop(whole, stop), ""
    for group in data.draw(groups(ids)):
        shown += stream.append(group)
        assert expected.startswith(shown), "it shows text behind the stop string"
    assert shown + stream.finish() == stream.text == expected
    assert stream.is_stopped == any(s in whole for s in stop)


def test_a_character_waits_for_its_last_byte():
    stream = TextStream(ByteTokenizer())
    assert [stream.append([byte]) for byte in "é日".encode()] == ["", "é", "", "", "日"]


def test_an_incomplete_character_is_replaced_at_the_end():
    stream = TextStream(ByteTokenizer())
    assert stream.append([0x61, 0xC3]) == "a"
    assert (stream.finish(), stream.text) == ("\ufffd", "a\ufffd")


def test_a_space_between_prompt_and_text_is_kept(tokenizer):
    prompt, new = tokenizer.encode("the drafts"), without_bos(tokenizer, "the drafts of every")
    first = new[len(prompt) - 1 :]
    stream = TextStream(tokenizer, prompt)
    assert "".join(stream.append([token]) for token in first) == " of every"


@pytest.mark.parametrize("end", [b"\xe2", b"\xe2\x82", b"\x80\x80\x80"])
def test_a_stop_string_before_an_incomplete_character_ends_the_text_at_once(end):
    stream = TextStream(ByteTokenizer(), stop=["cd"])
    assert stream.append(b"abcd" + end) == "ab"
    assert stream.is_stopped


def test_whole_characters_before_an_incomplete_one_do_not_wait():
    stream = TextStream(ByteTokenizer(), b"a")
    assert [stream.append(part) for part in (b"b\xe2", b"\x82", b"\xacc\xe2", b"\x82\xac")] == [
        "b", "", "\u20acc", "\u20ac",
    ]  # fmt: skip
    assert stream.finish() == ""


def test_nothing_follows_a_stop_string():
    stream = TextStream(ByteTokenizer(), (), ["bc"])
    assert [stream.append([byte]) for byte in b"abcd"] == ["a", "", "", ""]
    assert (stream.finish(), stream.text, stream.is_stopped) == ("", "a", True)


def test_held_text_appears_when_it_does_not_become_a_stop_string():
    stream = TextStream(ByteTokenizer(), (), ["abc"])
    assert [stream.append([byte]) for byte in b"ababd"] == ["", "", "ab", "", "abd"]
    assert TextStream(ByteTokenizer(), (), ["abc"]).finish() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="a stop string is empty") as caught:
        TextStream(ByteTokenizer(), (), ["a", ""])
    assert caught.value.field == "stop"
