"""Reads the tokenizer, chat template and generation defaults of a Hugging Face directory.

In: the directory and its ``config.json``.  Out: :class:`TokenizerAssets` and the files used.  Next
file: ``decoder.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from zerolayer.runtime_stub.errors import InputFileError, UnsupportedError

from .config import TokenizerAssets
from .json_file import MAX_CONFIG_BYTES, read_bytes, read_json_object

MAX_TOKENIZER_BYTES = 64 << 20
_MAX_TOKEN = 2**31
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_tokenizer(
    directory: Path, config: Mapping[str, Any]
) -> tuple[TokenizerAssets, tuple[Path, ...]]:
    """Everything about text in ``directory``, and the files it came from.

    Raises InputFileError when ``tokenizer.json`` is missing or damaged, UnsupportedError when the
    tokenizer does something that the loader does not do.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise InputFileError(
            "the model has no tokenizer.json",
            where=str(directory),
            next_step="make one with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    files = [path]
    data = read_bytes(path, MAX_TOKENIZER_BYTES)
    tokenizer = parse_tokenizer(data, str(path))
    settings = _optional(directory / "tokenizer_config.json", files)
    generation = _optional(directory / "generation_config.json", files)
    where = str(directory / "tokenizer_config.json")
    bos_token, eos_token = (_token(settings, key, where) for key in ("bos_token", "eos_token"))
    bos_id = tokenizer.token_to_id(bos_token) if bos_token else None
    if bos_id is None:
        bos_id = next(iter(_ids(config, "bos_token_id", str(directory / "config.json"))), None)
    eos_ids = (
        _ids(generation, "eos_token_id", str(directory / "generation_config.json"))
        or _ids(config, "eos_token_id", str(directory / "config.json"))
        or ((tokenizer.token_to_id(eos_token),) if eos_token else ())
    )
    assets = TokenizerAssets(
        tokenizer_json=data,
        chat_template=_chat_template(directory, settings, files),
        bos_id=bos_id,
        eos_ids=tuple(i for i in eos_ids if i is not None),
        add_bos=_adds_bos(tokenizer, settings, bos_id, where),
        bos_token=bos_token,
        eos_token=eos_token,
        generation=_generation(generation, str(directory / "generation_config.json")),
    )
    return assets, tuple(files)


def parse_tokenizer(data: bytes, where: str) -> Tokenizer:
    """A ``tokenizers`` tokenizer from the bytes of a tokenizer.json.  Raises InputFileError."""
    try:
        return Tokenizer.from_str(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text (byte {error.start})"
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of the Rust library is not an Exception
        what = f"is not a tokenizer: {str(error)[:200]}"
    raise InputFileError(what, where=where, next_step="fetch the tokenizer again")


def _optional(path: Path, files: list[Path]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    files.append(path)
    return read_json_object(path, huge=True)


def _wrong(key: str, value: Any, where: str) -> InputFileError:
    return InputFileError(
        f"{key} = {str(value)[:60]!r} makes no sense",
        where=where,
        next_step="fetch the file again",
    )


def _token(settings: Mapping[str, Any], key: str, where: str) -> str:
    """A special token's text, written plainly or as an object; empty when there is none."""
    value = settings.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > 1024:
        raise _wrong(key, value, where)
    return value


def _ids(config: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    """Token ids, written as one or as a list; empty when there are none."""
    value = config.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if len(ids) > 1024 or not all(type(i) is int and 0 <= i < _MAX_TOKEN for i in ids):
        raise _wrong(key, value, where)
    return tuple(ids)


def _adds_bos(
    tokenizer: Tokenizer, settings: Mapping[str, Any], bos_id: int | None, where: str
) -> bool:
    """Whether raw text gets the BOS token in front: the explicit setting, or what the file does."""
    try:
        ids = tokenizer.encode("a").ids
        plain = tokenizer.encode("a", add_special_tokens=False).ids
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of the Rust library is not an Exception
        raise InputFileError(
            f"the tokenizer fails on plain text: {str(error)[:200]}",
            where=where,
            next_step="fetch the tokenizer again",
        ) from error
    adds = bos_id is not None and ids == [bos_id, *plain]
    if (ids != plain and not adds) or settings.get("add_eos_token") is True:
        raise UnsupportedError(
            "the tokenizer adds other special tokens than BOS to plain text",
            where=where,
            next_step="set add_eos_token to false and remove the post-processor's other tokens",
        )
    explicit = settings.get("add_bos_token")
    if explicit is None:
        return adds
    if not isinstance(explicit, bool):
        raise _wrong("add_bos_token", explicit, where)
    return explicit and bos_id is not None


def _chat_template(directory: Path, settings: Mapping[str, Any], files: list[Path]) -> str | None:
    """The default chat template: its own file wins over tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    where = str(path)
    if path.is_file():
        files.append(path)
        try:
            return read_bytes(path, MAX_CONFIG_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _wrong("the text", f"byte {error.start} is not UTF-8", where) from error
    where, template = str(directory / "tokenizer_config.json"), settings.get("chat_template")
    if template is None:
        where = str(directory / "chat_template.json")
        template = _optional(directory / "chat_template.json", files).get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise _wrong("chat_template", template, where)
    return template


def _generation(generation: Mapping[str, Any], where: str) -> tuple[tuple[str, float], ...]:
    """Sampling defaults; greedy models keep only their repetition penalty."""
    sampled = generation.get("do_sample") is True
    out: list[tuple[str, float]] = []
    for key in _SAMPLING:
        value = generation.get(key)
        if value is None or not (sampled or key == "repetition_penalty"):
            continue
        if type(value) not in (int, float) or not 0 <= value < 1e6:
            raise _wrong(key, value, where)
        out.append((key, float(value)))
    if sampled and "temperature" not in dict(out):
        out.insert(0, ("temperature", 1.0))
    return tuple(out)
