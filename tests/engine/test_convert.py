import json

import pytest

from pdactors.engine import convert
from pdactors.engine.manifest import silent
from pdactors.errors import ModelError
from pdactors.text.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
LAYERS, HIDDEN, HEADS, KV_HEADS, VOCAB = 2, 64, 4, 2, 300


@pytest.fixture(scope="module")
def source():
    """A tiny Llama with weights that bfloat16 holds exactly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 12345.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


def write_gguf(path, model, *, pre="smollm"):
    """Write a model as llama.cpp's converter does."""
    from pdactors.text.detokenizer import _BYTES

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_license("mit")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(12345.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(VOCAB)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_BYTES, "ĠĠ"]
    tokens += [f"<unused{index}>" for index in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (VOCAB - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")
    for name, tensor in tensors_of(model).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(model):
    state = {key.removeprefix("model."): value.detach() for key, value in model.state_dict().items()}
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    tensors = {"token_embd.weight": state["embed_tokens.weight"], "output_norm.weight": state["norm.weight"]}
    for layer in range(LAYERS):
        for theirs, ours in names.items():
            tensors[f"blk.{layer}.{ours}.weight"] = state[f"layers.{layer}.{theirs}.weight"]
        for ours, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):  # llama.cpp interleaves the rotary halves
            weight = tensors[f"blk.{layer}.{ours}.weight"]
            halves = weight.reshape(heads, 2, -1, HIDDEN).transpose(1, 2)
            tensors[f"blk.{layer}.{ours}.weight"] = halves.reshape(weight.shape).contiguous()
    return tensors


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", source)
    metadata = convert.convert_gguf(path, folder, silent)
    assert metadata["general.license"] == "mit"
    return folder


def test_the_converted_model_computes_what_the_original_does(source, converted):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(converted), dtype=torch.float32)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, source(ids).logits, rtol=0, atol=1e-5)


def test_the_configuration_says_what_the_gguf_says(converted):
    config = json.loads((converted / "config.json").read_text("utf-8"))
    assert config["rope_parameters"]["rope_theta"] == 12345.0
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    assert json.loads((converted / "generation_config.json").read_text("utf-8"))["eos_token_id"] == 2


def test_the_tokenizer_and_the_chat_template_come_along(converted):
    tokenizer = Tokenizer(converted)
    assert tokenizer.decode(tokenizer.encode("a é")) == "a é"
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == [*tokenizer.encode("hi"), 2]
    assert tokenizer.vocab_size == VOCAB


def test_digits_stand_alone_where_the_vocabulary_was_trained_so(source, converted, tmp_path):
    two_spaces = Tokenizer(converted).encode("  x")[:1]
    assert Tokenizer(converted).encode("  5")[:1] != Tokenizer(converted).encode(" 5")[:1]  # "  " is one token
    other = tmp_path / "other"
    other.mkdir()
    convert.convert_gguf(write_gguf(tmp_path / "other.gguf", source, pre="gpt-2"), other, silent)
    assert Tokenizer(other).encode("  5")[0] == Tokenizer(other).encode(" 5")[0] == two_spaces[0]


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'pdactors\[gguf\]'"):
        convert.convert_gguf(tmp_path / "a.gguf", tmp_path, silent)


def test_a_file_that_is_no_gguf_is_refused_by_name(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"not a model" * 10)
    with pytest.raises(ModelError, match=r"a\.gguf cannot be converted"):
        convert.convert_gguf(tmp_path / "a.gguf", tmp_path, silent)


def test_a_configuration_that_differs_from_the_gguf_is_refused(source):
    stated = {"general.architecture": "llama", "llama.block_count": LAYERS, "llama.rope.freq_base": 12345.0}
    convert._check_config(source.config, stated)
    with pytest.raises(ModelError, match="num_hidden_layers 2 where the GGUF states 3"):
        convert._check_config(source.config, {**stated, "llama.block_count": 3})
    with pytest.raises(ModelError, match=r"rope_theta 12345\.0 where the GGUF states 10000\.0"):
        convert._check_config(source.config, {**stated, "llama.rope.freq_base": 10000.0})
