"""The sentencepiece library (of the extra sentencepiece) with one model."""

from __future__ import annotations

from typing import Any

from zero.base.errors import UserError, install_command
from zero.files.parsing import reading


class SentencePiece:
    """A model in the library: `encode`, and `proto`, its pieces and options (sentencepiece_model.proto).

    Raises:
      UserError: the library is missing, or it is not such a model.
    """

    def __init__(self, path: str, model: bytes):
        try:
            import sentencepiece
            from sentencepiece import sentencepiece_model_pb2
        except ImportError:
            raise UserError(
                f"tokenizer {path}: the sentencepiece library is missing; {install_command('sentencepiece')}"
            ) from None
        classes: Any = sentencepiece_model_pb2  # they exist at run time only
        with reading(f"tokenizer {path} is not a model of SentencePiece", Exception):
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.proto: Any = classes.ModelProto.FromString(model)

    def encode(self, text: str) -> list[int]:
        """The ids of a text without lone surrogates; spelled control symbols are text."""
        return self._processor.encode(text)
