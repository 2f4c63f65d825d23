"""train/tokenizer.py: text to ids and back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstorm.errors import CheckpointError
from torchstorm.train.tokenizer import make_tokenizer, tokenizer_from_json


@pytest.mark.parametrize("kind", ["bytes", "chars"])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_its_ids_also_through_json(kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind, text.encode())
    ids = tokenizer.encode(text.encode()).tolist()
    assert tokenizer.decode(ids) == text
    again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert again.vocab_size == tokenizer.vocab_size
    assert again.decode(ids) == text


@given(text=st.binary())
def test_the_bytes_tokenizer_takes_any_bytes_as_they_are(text: bytes) -> None:
    assert bytes(make_tokenizer("bytes", b"").encode(text).tolist()) == text


def test_characters_are_numbered_in_their_order_without_gaps() -> None:
    tokenizer = make_tokenizer("chars", "baßa😀".encode())
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("ab😀ß".encode()).tolist() == [0, 1, 3, 2]


def test_bytes_that_are_no_utf8_decode_to_replacement_characters() -> None:
    assert make_tokenizer("bytes", b"").decode([0x61, 0xFF]) == "a\N{REPLACEMENT CHARACTER}"


def test_an_unknown_tokenizer_in_a_checkpoint_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="'bpe'"):
        tokenizer_from_json({"kind": "bpe"})
