"""GGUF hooks of a transformers quantizer: `from_pretrained(dir, gguf_file=...)`.

transformers reads the config from the metadata, then hands file and model to the quantizer, which returns lazy tensors
by the model's names. Tensors that go into pages are placeholders: their planes are read from the file when it is their
turn.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from vbrt.host.file_prefetch import ReadAhead
from vbrt.integrations.gguf_rope import check_rope
from vbrt.libraries.transformers_api import HfQuantizer
from vbrt.saves.files.prefetch import read_ahead
from vbrt.saves.load.fill_while_reading import Filling
from vbrt.saves.published.dense_checkpoint import DenseCheckpoint
from vbrt.saves.published.gguf_checkpoint import GGUFTensors, gguf_checkpoint

__all__ = ["TakesGGUF"]


class TakesGGUF(HfQuantizer):
    """Quantizer mixin for GGUF files.

    Attributes:
        gguf: source of weights; None for files that transformers reads.
        ahead: prefetcher of the files during loading.
        filling: the model's planes during loading.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tensors: GGUFTensors | None = None
        self.gguf: DenseCheckpoint | None = None
        self.ahead: ReadAhead | None = None
        self.filling: Filling | None = None

    def read_header(self, gguf_file: str) -> None:
        """Open a GGUF file as the source of weights. Raises CheckpointError: it is damaged."""
        self._tensors = GGUFTensors(Path(gguf_file))
        self.gguf = gguf_checkpoint(self._tensors)

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the model's dtype; for a GGUF file and dtype="auto", which is None here, the file's."""
        return self._tensors.dtype if dtype is None and self._tensors is not None else dtype

    def get_state_dict(self, checkpoint_file: str, model: PreTrainedModel) -> dict[str, "_Lazy"]:
        """Return the GGUF file's tensors by model name, read lazily.

        Raises CheckpointError: it is of another model.
        """
        check_rope(model.config, self._tensors)
        model.tie_weights()
        self.gguf.outline_(model)
        self.ahead = read_ahead(self.gguf.files)
        for file in self.gguf.files:
            file.ahead = self.ahead
        return {name: _Lazy(self._read, name) for name in self.gguf.names}

    def _read(self, name: str) -> torch.Tensor:
        if self.filling is not None and self.filling.takes(name):
            return torch.zeros(1, dtype=torch.uint8, device="cpu")
        return self.gguf.read(name)


class _Lazy:
    """Lazy tensor, read when transformers indexes it."""

    def __init__(self, read: Callable[[str], torch.Tensor], name: str) -> None:
        self._own_read, self._name = read, name

    def __getitem__(self, places: object) -> torch.Tensor:
        return self._own_read(self._name)
