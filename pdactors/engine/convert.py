"""A .gguf file to a folder in Hugging Face format: bfloat16 safetensors, configuration, tokenizer. Done once a file."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from pdactors.engine.manifest import Progress
from pdactors.errors import ModelError

_NUM_STEPS = 4
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, OSError, AssertionError)

# Vocabularies trained on text in which every digit stands alone, which their GGUF says only by the name of the
# pre-tokenizer (llama.cpp: `\p{N}`, then GPT-2's pattern).
_DIGIT_SPLITTERS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})

# GGUF key below the architecture's name -> attribute of transformers' config; checked after loading.
_CHECKED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_TOKEN_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}


def convert_gguf(gguf: Path, folder: Path, progress: Progress) -> Mapping[str, Any]:
    """Write the model in `gguf` into the existing `folder`.

    Returns: the GGUF's own metadata, without its long arrays.

    Raises:
        ModelError: the gguf extra is not installed, transformers cannot read the file, or it reads it otherwise than
            the file's own metadata says.
    """
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        needs = " and ".join(missing)
        raise ModelError(f"reading {gguf.name} needs {needs}: pip install 'pdactors[gguf]'")
    with _quiet_transformers():
        try:
            progress("read the metadata", 0, _NUM_STEPS)
            metadata = _read_metadata(gguf)
            progress("convert the tokenizer", 1, _NUM_STEPS)
            _convert_tokenizer(gguf, folder, metadata)
            progress("convert the weights", 2, _NUM_STEPS)
            _convert_weights(gguf, folder, metadata)
        except _ERRORS as error:
            raise ModelError(f"{gguf} cannot be converted: {type(error).__name__}: {error}") from error
    progress("convert the weights", _NUM_STEPS, _NUM_STEPS)
    return metadata


def _read_metadata(gguf: Path) -> dict[str, Any]:
    from gguf import GGUFReader, GGUFValueType

    fields = GGUFReader(gguf).fields.values()
    return {field.name: field.contents() for field in fields if GGUFValueType.ARRAY not in field.types[:1]}


def _convert_tokenizer(gguf: Path, folder: Path, metadata: Mapping[str, Any]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    tokenizer.save_pretrained(str(folder))
    named = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    architecture = metadata["general.architecture"]
    config = {
        **named,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata[f"{architecture}.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if metadata.get("tokenizer.ggml.pre") in _DIGIT_SPLITTERS:
        path = folder / "tokenizer.json"
        description = json.loads(path.read_text("utf-8"))
        digits = {"type": "Digits", "individual_digits": True}
        description["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [digits, description["pre_tokenizer"]],
        }
        path.write_text(json.dumps(description, ensure_ascii=False), "utf-8")


def _convert_weights(gguf: Path, folder: Path, metadata: Mapping[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, local_files_only=True, dtype=torch.bfloat16, **_dequantize()
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):  # a model that has it refuses to be saved
        del config.quantization_config
    if hasattr(config, "_model_name_or_path"):  # the GGUF's title, not a place
        del config._model_name_or_path
    _check_config(config, metadata)
    ids = _token_ids(metadata)
    for key, value in ids.items():
        setattr(config, key, value)
    with torch.device("meta"):
        fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    fresh.generation_config = GenerationConfig(**ids)
    fresh.save_pretrained(str(folder))


def _dequantize() -> dict[str, Any]:
    """Ask for plain weights, where transformers may otherwise keep them packed."""
    import transformers

    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def _check_config(config: Any, metadata: Mapping[str, Any]) -> None:
    """Refuse a configuration that differs from what the GGUF states about itself."""
    architecture = metadata["general.architecture"]
    text = config.get_text_config()
    for key, attribute in _CHECKED.items():
        stated, read = metadata.get(f"{architecture}.{key}"), getattr(text, attribute, None)
        if stated is not None and read is not None and stated != read:
            raise ModelError(f"transformers read {attribute} {read} where the GGUF states {stated}")
    stated, read = metadata.get(f"{architecture}.rope.freq_base"), _rope_theta(text)
    if stated is not None and read is not None and not math.isclose(stated, read, rel_tol=1e-6):
        raise ModelError(f"transformers read rope_theta {read} where the GGUF states {stated}")


def _rope_theta(config: Any) -> float | None:
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict):
        value = parameters.get("rope_theta")
        return None if value is None else float(value)
    value = getattr(config, "rope_theta", None)
    return None if value is None else float(value)


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    stated = {name: metadata.get(f"tokenizer.ggml.{key}") for key, name in _TOKEN_IDS.items()}
    return {name: int(value) for name, value in stated.items() if value is not None}


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars of transformers' own while ours is shown; one of them can only be caught at stderr."""
    import transformers

    logging = transformers.utils.logging
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
