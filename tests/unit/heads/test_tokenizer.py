from __future__ import annotations

import pytest

from graphkit.errors import InputError
from graphkit.models.tokenizer import decode, encode


def test_a_token_is_a_byte():
    assert encode("def é") == [100, 101, 102, 32, 195, 169]
    assert decode([100, 101, 102, 32, 195, 169]) == "def é"
    assert encode("") == []


def test_half_a_character_is_replaced():
    assert decode([97, 195]) == "a�"


def test_bytes_that_are_no_text_survive_in_surrogates():
    assert encode(b"a\xff".decode(errors="surrogateescape")) == [0x61, 0xFF]


def test_other_surrogates_are_refused():
    with pytest.raises(InputError, match="not valid Unicode: surrogates not allowed at position 1"):
        encode("a\ud800")


@pytest.mark.parametrize("ids", [[256], [-1]])
def test_ids_outside_of_a_byte_raise(ids):
    with pytest.raises(InputError, match="from 0 to 255") as caught:
        decode(ids)
    assert caught.value.field == "ids"
