"""Small tokenizers of the three families, made here and saved as model folders."""

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pdactors.text.tokenizer import Tokenizer

CORPUS = [
    "the cat sat on the mat",
    "  what is the capital of France?",
    "naïve café über",
    "日本語のテキスト",
    "😀😃 ok",
] * 8
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("日 本", special=False)])
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    letters = [*"abcdefghijklmnopqrstuvwxyz?.é", "▁", "\ufffd"]
    words = ["▁t", "▁th", "▁the", "at", "▁c", "▁cat"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *letters, *words]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "t"), ("▁", "c"), ("▁c", "at")]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def chained_backend() -> tokenizers.Tokenizer:
    """Bytes, by a decoder that is not plainly the byte level one."""
    backend = byte_level_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


BACKENDS = {
    "chained": chained_backend,
    "byte level": byte_level_backend,
    "byte fallback": byte_fallback_backend,
    "metaspace": metaspace_backend,
}


def save(folder, backend, **config):
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory):
    """Save a tokenizer of a family with this tokenizer_config.json and load it."""

    def make(family, **config):
        return Tokenizer(save(tmp_path_factory.mktemp("tokenizer"), BACKENDS[family](), **config))

    return make


@pytest.fixture(scope="session")
def chatml():
    return CHATML


@pytest.fixture(scope="session", params=list(BACKENDS))
def tokenizer(request, make_tokenizer):
    return make_tokenizer(request.param)


@pytest.fixture(scope="session")
def chat_tokenizer(make_tokenizer, chatml):
    return make_tokenizer("byte level", chat_template=chatml, eos_token="<|im_end|>")
