"""Headers of weight files on the Hugging Face Hub, without their tensors: for commands that read nothing else.

Files of the true size, in which everything behind the header is a hole, so that readers check what they always check.
"""

import atexit
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from vbrt.errors import CheckpointError
from vbrt.integrations.register_hooks import Deferred
from vbrt.saves.files.checkpoint_paths import GGUF_SUFFIX

__all__ = ["hollow_file", "scratch_folder"]

_LENGTH = struct.Struct("<Q")
_FIRST_BYTES = 512 << 10  # the whole header of most safetensors files
_GGUF_FIRST_BYTES = 8 << 20  # vocabularies lie in the header
_MOST_BYTES = 256 << 20
# these import torch, which takes longer than most downloads of headers
_gguf_library = Deferred("vbrt.saves.files.gguf_file", "gguf_library")
_gguf_file = Deferred("vbrt.saves.files.gguf_file", "GGUFFile")


def scratch_folder() -> Path:
    """Make a folder for hollow files, which goes when the process ends."""
    folder = tempfile.mkdtemp(prefix="vbrt-hub-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def hollow_file(repo: str, name: str, commit: str | None, nbytes: int, path: Path) -> None:
    """Write a file of a repository to `path`: its header, and a hole for the rest of its `nbytes`.

    Raises:
        CheckpointError, LibraryError: a GGUF file cannot be read without the package gguf.
        huggingface_hub's errors: it cannot be fetched.
    """
    url, headers = hf_hub_url(repo, name, revision=commit), build_hf_headers()

    def fetch(begin: int, end: int) -> bytes:
        answer = get_session().get(url, headers={**headers, "Range": f"bytes={begin}-{end - 1}"})
        hf_raise_for_status(answer)
        if answer.status_code != 206:
            raise OSError(f"{name}: the server does not send parts of files")
        return answer.content

    path.parent.mkdir(parents=True, exist_ok=True)
    (_fetch_gguf if name.endswith(GGUF_SUFFIX) else _fetch_safetensors)(fetch, nbytes, path)


def _fetch_safetensors(fetch: Callable[[int, int], bytes], nbytes: int, path: Path) -> None:
    head = fetch(0, min(nbytes, _FIRST_BYTES))
    end = _LENGTH.size + _LENGTH.unpack_from(head)[0] if len(head) >= _LENGTH.size else 0
    if len(head) < end <= min(nbytes, _MOST_BYTES):
        head += fetch(len(head), end)
    _write(path, head, nbytes)


def _fetch_gguf(fetch: Callable[[int, int], bytes], nbytes: int, path: Path) -> None:
    """The header does not tell its length: more is fetched until it can be read."""
    _gguf_library()  # without it nothing can be read
    head = b""
    while True:
        head += fetch(len(head), min(nbytes, max(_GGUF_FIRST_BYTES, 4 * len(head))))
        _write(path, head, nbytes)
        if len(head) >= min(nbytes, _MOST_BYTES) or _is_whole(path, len(head)):
            return


def _is_whole(path: Path, fetched: int) -> bool:
    try:
        tensors = _gguf_file(path).tensors.values()
    except CheckpointError:  # the hole, so far; a damaged file is reported by its reader
        return False
    return min((tensor.begin for tensor in tensors), default=0) <= fetched


def _write(path: Path, head: bytes, nbytes: int) -> None:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(nbytes)
