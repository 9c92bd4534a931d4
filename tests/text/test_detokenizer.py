import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdactors.text.detokenizer import Detokenizer

TEXTS = [
    "the cat",
    " leading space",
    "😀 ok 😃",
    "日本語 日 本 テキスト",
    "a\n\n  b\té?",
    "<think>hm",
    "\ufffd the\ufffd",
]


def pieces_of(tokenizer, ids, tail=()):
    detokenizer = Detokenizer(tokenizer, tail)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_put_together_are_what_decoding_all_ids_gives(tokenizer, data):
    # 5 ids beyond the vocabulary: a model's output layer may be wider than its tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 4), max_size=40))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_runs_of_bytes_between_words_are_exact(make_byte_fallback, data):
    tokenizer = make_byte_fallback
    words = st.sampled_from([tokenizer.encode("cat")[-1], *sorted(tokenizer.special_ids), tokenizer.vocab_size - 1])
    some_bytes = st.sampled_from(sorted(tokenizer.byte_ids)[0x40:0x42] + sorted(tokenizer.byte_ids)[0xE0:0xE3])
    ids = data.draw(st.lists(st.one_of(words, some_bytes, st.sampled_from(sorted(tokenizer.byte_ids))), max_size=24))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def make_byte_fallback(make_tokenizer):
    return make_tokenizer("byte fallback")


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.text(max_size=20))
def test_any_text_comes_back_from_bytes(chat_tokenizer, text):
    ids = chat_tokenizer.encode(text)
    assert "".join(pieces_of(chat_tokenizer, ids)) == chat_tokenizer.decode(ids)


@pytest.mark.parametrize("family", ["byte level", "byte fallback", "chained"])
def test_no_piece_holds_half_a_character(make_tokenizer, family):
    tokenizer = make_tokenizer(family)
    pieces = pieces_of(tokenizer, tokenizer.encode("a 🦜 b 日"))
    assert "".join(pieces).endswith("a 🦜 b 日")
    assert not any("\ufffd" in piece for piece in pieces)
    assert "🦜" in "".join(pieces[:-1])  # given when it was complete, not at the end


def test_text_is_given_token_by_token(make_tokenizer):
    for family in ("byte level", "byte fallback"):
        tokenizer = make_tokenizer(family)
        ids = tokenizer.encode("the cat the cat")
        *pieces, rest = pieces_of(tokenizer, ids)
        assert all(piece for piece, token_id in zip(pieces, ids, strict=True) if token_id not in tokenizer.special_ids)
        assert rest == ""


def test_an_unfinished_character_is_given_at_the_end(chat_tokenizer):
    ids = chat_tokenizer.encode("🦜")[:-1]
    assert pieces_of(chat_tokenizer, ids)[:-1] == [""] * len(ids)
    assert pieces_of(chat_tokenizer, ids)[-1] == chat_tokenizer.decode(ids) == "\ufffd"


def test_after_a_prompt_the_leading_space_is_kept(make_byte_fallback):
    the, cat = make_byte_fallback.encode("the cat")[1:]
    assert "".join(pieces_of(make_byte_fallback, [cat])) == "cat"
    assert "".join(pieces_of(make_byte_fallback, [cat], tail=[the])) == " cat"


@pytest.mark.parametrize("family", ["byte level", "byte fallback", "chained"])
def test_a_character_begun_in_the_prompt_is_completed(make_tokenizer, family):
    tokenizer = make_tokenizer(family)
    ids = tokenizer.encode("a🦜b")
    assert "".join(pieces_of(tokenizer, ids[-2:], tail=ids[:-2])) == "🦜b"


class CountingTokenizer:
    """Counts the ids that are decoded."""

    def __init__(self, inner):
        self._inner = inner
        self.num_decoded = 0

    def decode(self, ids):
        self.num_decoded += len(ids)
        return self._inner.decode(ids)

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.parametrize("token", ["</s>", "<0x80>", "e"])
def test_work_per_token_does_not_grow_with_the_answer(make_byte_fallback, token):
    counting = CountingTokenizer(make_byte_fallback)
    token_id = next(i for i in range(counting.vocab_size) if counting.token(i) == token)
    pieces_of(counting, [token_id] * 2000)
    assert counting.num_decoded <= 8 * 2000
