"""Text in and out: the tokenizer and the chat template that travel in the artifact.

In: members ``tokenizer.bin``, ``tokenizer.json``, ``chat_template.jinja``, ``vendor/``; the
manifest's ``tokenizer``.  Out: token ids and text.  Next file: ``bytelevel.py`` (the table),
``template.py``, then ``stream.py`` (text that grows token by token).

Where the manifest has a ``tokenizer.table``, the compiler has found that the table gives the same
ids.  Everything else goes to the compiled module of the ``tokenizers`` wheel, loaded from memory;
its package's own ``__init__`` is not needed.  Nothing is imported before it is really needed.

A beginning-of-text token is put in front of raw text exactly when the manifest says ``add_bos`` and
the text does not begin with it already.  A chat template writes its own.
"""

from __future__ import annotations

import sys

from .errors import InputFileError, UnsupportedError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from .bytelevel import ByteLevelTable
    from .container import Artifact

TOKENIZERS_MODULE = "vendor/tokenizers/tokenizers.abi3.so"
_IDS_ONLY = "use --tokens 1,2,3 and read the token ids that come back"


def _rust_module(artifact: Artifact) -> Any:
    """The vendored ``tokenizers`` extension, or the one that this process has already."""
    name = "tokenizers.tokenizers"
    if name in sys.modules:
        return sys.modules[name]
    if TOKENIZERS_MODULE not in artifact.names:
        raise UnsupportedError(
            "this artifact carries no tokenizer module, it takes and gives token ids only",
            where=artifact.path,
            next_step=_IDS_ONLY,
        )
    from importlib.machinery import ExtensionFileLoader, ModuleSpec
    from importlib.util import module_from_spec

    from .dlopen import LoadablePath

    data = artifact.member(TOKENIZERS_MODULE)
    with LoadablePath("tokenizers", data) as path:
        try:
            loader = ExtensionFileLoader(name, path)
            module = module_from_spec(ModuleSpec(name, loader, origin=path))
            loader.exec_module(module)
        except ImportError as e:
            raise UnsupportedError(
                f"the tokenizer module does not load in Python {sys.version.split()[0]}: {e}",
                where=f"{artifact.path}:{TOKENIZERS_MODULE}",
                next_step=f"use Python 3.10 or later with libstdc++, or {_IDS_ONLY}",
            ) from None
    sys.modules[name] = module
    return module


class TextCodec:
    """Text to ids and back for one artifact."""

    def __init__(self, artifact: Artifact) -> None:
        settings = artifact.manifest.get("tokenizer")
        if not settings:
            raise UnsupportedError(
                "this artifact has no tokenizer, it takes and gives token ids only",
                where=artifact.path,
                next_step=_IDS_ONLY,
            )
        self._artifact = artifact
        self._settings: Mapping[str, Any] = settings
        self._template: Any = None
        self._tokenizer: Any = None
        self._table: ByteLevelTable | None = None
        table = settings.get("table")
        if table is None:
            self._library()
        else:
            from .bytelevel import ByteLevelTable

            name = table.get("file") or "tokenizer.bin"
            where = f"{artifact.path}:{name}"
            self._table = ByteLevelTable(artifact.member(name), table, where)
        self.bos_id: int | None = settings.get("bos_id")
        self.add_bos: bool = bool(settings.get("add_bos")) and self.bos_id is not None

    def _library(self) -> Any:
        """The library's tokenizer, loaded when first needed."""
        if self._tokenizer is None:
            module = _rust_module(self._artifact)
            raw = self._artifact.member(self._settings.get("file", "tokenizer.json"))
            try:
                self._tokenizer = module.Tokenizer.from_buffer(raw)
            except BaseException as e:
                raise self._failure(e, "tokenizer.json") from None
        return self._tokenizer

    def _failure(self, error: BaseException, what: str) -> BaseException:
        """A failure inside the vendored code as one of ours (its panics are BaseExceptions)."""
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            return error
        text = str(error).splitlines() or [type(error).__name__]
        return InputFileError(f"{what}: {text[0][:300]}", where=self._artifact.path)

    # ids ----------------------------------------------------------------------------------------

    def encode(self, text: str, *, raw: bool) -> list[int]:
        """Token ids of ``text``.  ``raw``: text for the model to go on with (gets the beginning
        token); otherwise a rendered template, which has its own."""
        check_utf8(text, "the prompt")
        if self._table is not None and self._table.takes(text):
            ids = self._table.encode(text)
        else:
            library = self._library()
            try:
                ids = library.encode(text, add_special_tokens=False).ids
            except BaseException as e:
                raise self._failure(e, "encoding the prompt") from None
        if raw and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens left out."""
        if self._table is not None:
            return self._table.decode(ids)
        try:
            text: str = self._library().decode(ids, skip_special_tokens=True)
        except BaseException as e:
            raise self._failure(e, "decoding tokens") from None
        return text

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written ``text``; None when there is none.

        Special tokens never appear in decoded text, so a stop string that is one is a stop id.
        """
        if self._table is not None:
            return self._table.special_id(text)
        added: Mapping[int, Any] = self._library().get_added_tokens_decoder()
        for number, token in added.items():
            if token.special and token.content == text:
                return int(number)
        return None

    # chat ---------------------------------------------------------------------------------------

    @property
    def has_template(self) -> bool:
        return bool(self._settings.get("chat_template"))

    def render(self, messages: Sequence[Mapping[str, str]], *, generation: bool = True) -> str:
        """The chat template's text for ``messages`` (``role`` and ``content``)."""
        if not self.has_template:
            raise UnsupportedError(
                "the model has no chat template",
                where=self._artifact.path,
                next_step="use generate --raw",
            )
        for message in messages:
            check_utf8(message["content"], "a message")
        from .template import bounded, compile_template

        def work() -> str:
            if self._template is None:
                source = self._artifact.member(self._settings["chat_template"]).decode("utf-8")
                self._template = compile_template(source, self._artifact.path)
            variables: dict[str, Any] = {"messages": [dict(m) for m in messages]}
            variables.update(tools=None, documents=None, add_generation_prompt=generation)
            for key in ("bos_token", "eos_token"):
                if self._settings.get(key):
                    variables[key] = self._settings[key]
            text: str = self._template.render(**variables)
            return text

        try:
            return bounded(work, self._artifact.path)
        except (InputFileError, UnsupportedError):
            raise
        except BaseException as e:
            raise self._failure(e, "the chat template") from None


def check_utf8(text: str, what: str) -> None:
    """UsageError when ``text`` came from bytes that are not UTF-8 (they show up as surrogates)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise UsageError(
            f"{what} is not valid UTF-8 (character {e.start} of {len(text)})",
            next_step="give UTF-8 text, or token ids with --tokens",
        ) from None
