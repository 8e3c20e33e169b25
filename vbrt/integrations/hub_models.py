"""Models by their names on the Hugging Face Hub: fetched into the Hub's cache, as transformers does, and read there.

    path = located("Qwen/Qwen3-0.6B")                         # a snapshot directory: weights, configs, tokenizer
    path = located("Qwen/Qwen3-0.6B", need="config")          # its config.json alone
    path = located("unsloth/Qwen3-0.6B-GGUF:Q4_K_M")          # one GGUF file, by its quantization or its name

What is here under that name wins, and needs no network. Everything else is huggingface_hub's: cache, resumption,
progress bars, tokens, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. Code that comes with a model is neither fetched nor run.
Importing this module imports huggingface_hub, which comes with transformers; neither torch nor transformers.
"""

import contextlib
import errno
import glob
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Literal

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)

from vbrt.errors import CheckpointError, ConfigError, VBError, describe_os_error, first_line
from vbrt.host.logger import warn
from vbrt.integrations.hub_headers import hollow_file, scratch_folder
from vbrt.report.progress import wanted
from vbrt.residency.byte_text import format_bytes
from vbrt.saves.files.checkpoint_paths import GGUF_SUFFIX, INDEX, MANIFEST, PICKLED, SINGLE, shard_paths
from vbrt.saves.files.json_file import read_json

__all__ = ["located"]

Need = Literal["weights", "headers", "config"]
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<part>[\w./-]+))?", re.ASCII)
_CONFIG = "config.json"
_WEIGHTS = (INDEX, SINGLE, *PICKLED)  # the first one that is there, as readers of directories choose
_HEADED = (".safetensors", GGUF_SUFFIX)
_COMPANIONS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_MAX_INDEX_BYTES = 256 << 20
# besides the Hub's refusals: errors of its HTTP library, which is another one in each of its versions, and answers of
# proxies, which are no JSON
_UNANSWERED = (OSError, ValueError, *HfHubHTTPError.__bases__)
_SHOWN = 8  # names in an error


@dataclass(frozen=True, slots=True)
class _HubName:
    """Name of a model on the Hub. part: after a colon, a GGUF file or its quantization; "" for none."""

    repo: str
    part: str
    revision: str | None

    @property
    def text(self) -> str:
        return f"{self.repo}:{self.part}" if self.part else self.repo

    @property
    def page(self) -> str:
        return f"{constants.ENDPOINT}/{self.repo}"


def located(
    name: str | PathLike, *, revision: str | None = None, need: Need = "weights", progress: bool | None = None
) -> str | PathLike:
    """Return the path of a model: the given one, or that of a Hub model in the Hub's cache, fetched if need be.

    Only a str of the form `org/name`, `org/name:file.gguf` or `org/name:Q4_K_M`, of which nothing is here, is a Hub
    name; any other path is returned as it is, there or not.

    Args:
        revision: branch, tag or commit of a Hub model; default: its main branch.
        need: of a Hub model that is not in the cache: all of it; the headers of its weights, in a folder that lasts as
            long as the process; or the config, which for GGUF is the header, too.
        progress: as for `vbrt.load`; the bars are huggingface_hub's.

    Raises:
        ConfigError: a revision for a path.
        CheckpointError: no weights in the repository that vbrt reads, several GGUF files, or an incomplete cache.
        VBError: unknown, private or gated model, no network, no space, or a download that broke off.
    """
    asked = _parsed(name, revision)
    if asked is None or _is_here(asked.text):
        if revision is not None:
            raise ConfigError(
                f"{name}: revision={revision!r} with a path; applies to a model of the Hub, such as Qwen/Qwen3-0.6B"
            )
        return name
    if asked.part and _is_here(asked.repo):
        files = [file.name for file in Path(asked.repo).glob(f"*{GGUF_SUFFIX}")]
        return Path(asked.repo) / _gguf_parts(files, asked)[0]
    with _bars(wanted(progress)):
        return _fetched(asked, need)


def _parsed(name: str | PathLike, revision: str | None) -> _HubName | None:
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return None
    try:
        validate_repo_id(found["repo"])
    except HFValidationError:  # such as "a--b": a path, and never a name
        return None
    return _HubName(found["repo"], found["part"] or "", revision)


def _is_here(name: str) -> bool:
    try:
        return os.path.lexists(name)
    except (OSError, ValueError):
        return True  # whoever reads the path reports it


# -- fetching ---------------------------------------------------------------------------------------------------------


def _fetched(asked: _HubName, need: Need) -> Path:
    """Fetch what is missing in the cache; return the path there."""
    try:
        info = HfApi().model_info(
            asked.repo, revision=asked.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
    except _UNANSWERED as error:
        return _cached(asked, error, need)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if _stays_inside(file.rfilename)}

    def read(file: str) -> Path:
        with _downloading(asked):
            return Path(hf_hub_download(asked.repo, file, revision=asked.revision))

    chosen = _chosen(sizes, asked, read, need)
    if absent := [file for file in chosen if file not in sizes]:
        raise CheckpointError(f"{asked.repo}: its index names {_some(absent)}, which are missing in the repository")
    first, here = chosen[0], {file: _in_cache(asked.repo, file, info.sha) for file in chosen}
    missing = [file for file, path in here.items() if path is None]
    if any(file.endswith(_HEADED) for file in missing) and _headers_suffice(chosen, need, read):
        return _path_of(chosen, _hollow(asked, info.sha, chosen, sizes, read) / first)
    _check_space(asked, sum(sizes[file] for file in missing))
    if not missing and _in_cache(asked.repo, first, asked.revision) == here[first]:
        return _path_of(chosen, Path(here[first]))
    if len(chosen) == 1:
        return read(first)
    with _downloading(asked):  # by the branch: its entry in the cache is what is found offline
        patterns = [glob.escape(file) for file in chosen]
        snapshot = snapshot_download(asked.repo, revision=asked.revision, allow_patterns=patterns)
    return _path_of(chosen, Path(snapshot, first))


def _stays_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in file


def _headers_suffice(chosen: Collection[str], need: Need, read: Callable[[str], Path]) -> bool:
    """True if nothing but headers of these weights is read. Of checkpoints quantized by other libraries, some small
    tensors are, too."""
    if need == "weights" or not all(file.endswith((*_HEADED, *_COMPANIONS)) for file in chosen):
        return False
    if need == "config" or any(file.endswith(GGUF_SUFFIX) for file in chosen):
        return True
    return MANIFEST not in chosen and "quantization_config" not in read_json(read(_CONFIG), _MAX_INDEX_BYTES)


def _hollow(
    asked: _HubName, commit: str | None, chosen: Collection[str], sizes: Mapping[str, int], read: Callable[[str], Path]
) -> Path:
    """Return a folder with configs, and weight files that are all header."""
    folder = scratch_folder()
    for file in chosen:
        if file.endswith(_HEADED):
            with _downloading(asked):
                hollow_file(asked.repo, file, commit, sizes[file], folder / file)
        elif file in (_CONFIG, INDEX):
            shutil.copyfile(read(file), folder / file)
    return folder


def _cached(asked: _HubName, error: BaseException, need: Need) -> Path:
    """Return the path of a model that an earlier call, or transformers, has fetched; else raise why it cannot be."""
    if isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):
        raise _refusal(asked, error) from error
    try:
        there = snapshot_download(asked.repo, revision=asked.revision, allow_patterns=[], local_files_only=True)
    except OSError:  # the reason to tell is the first one: the Hub cannot be asked
        raise _refusal(asked, error) from error
    snapshot = Path(there)
    files = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file()]
    try:
        chosen = _chosen(files, asked, snapshot.joinpath, need)
    except CheckpointError as refusal:
        raise CheckpointError(
            f"{refusal}; this is the copy in the Hub's cache, and {_reason(error)}; the same command fetches the rest "
            "where the Hub can be reached"
        ) from error
    if absent := [file for file in chosen if file not in files]:
        raise CheckpointError(
            f"{asked.repo}: the copy in the Hub's cache lacks {_some(absent)}, and {_reason(error)}; the same command "
            "fetches the rest where the Hub can be reached"
        ) from error
    if not isinstance(error, OfflineModeIsEnabled):
        warn(f"{asked.repo}: {_reason(error)}; the copy in the Hub's cache is used", stacklevel=5)
    return _path_of(chosen, snapshot / chosen[0])


def _path_of(chosen: Collection[str], first: Path) -> Path:
    """Return a GGUF file or a config.json itself; of more, the directory."""
    return first if first.suffix == GGUF_SUFFIX or len(chosen) == 1 else first.parent


def _in_cache(repo: str, file: str, commit: str | None) -> str | None:
    found = try_to_load_from_cache(repo, file, revision=commit)
    return found if isinstance(found, str) else None  # it also knows files that are not on the Hub


def _check_space(asked: _HubName, nbytes: int) -> None:
    folder = Path(constants.HF_HUB_CACHE)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if nbytes > free:
        raise VBError(
            f"{asked.repo}: {format_bytes(nbytes)} to fetch, and {folder} has {format_bytes(free)} free; make room, or "
            "name a folder on another drive with the environment variable HF_HOME"
        )


@contextlib.contextmanager
def _downloading(asked: _HubName) -> Iterator[None]:
    """Turn what huggingface_hub raises in the block into a VBError."""
    try:
        yield
    except VBError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
            raise VBError(
                f"{error.filename or constants.HF_HUB_CACHE}: cannot be written: {describe_os_error(error)}; make "
                "room, or name a folder on another drive with the environment variable HF_HOME"
            ) from error
        raise _refusal(asked, error, is_download=True) from error
    except Exception as error:  # of its HTTP library, and of hf_xet
        raise _refusal(asked, error, is_download=True) from error


def _refusal(asked: _HubName, error: BaseException, *, is_download: bool = False) -> VBError:
    """Return the error to raise for one of huggingface_hub."""
    login = "hf auth login, or the environment variable HF_TOKEN"
    if isinstance(error, GatedRepoError):
        return VBError(f"{asked.repo}: access is restricted; accept its terms at {asked.page}, then log in: {login}")
    if isinstance(error, RepositoryNotFoundError):
        return VBError(
            f"{asked.text}: no such file or directory here, and no such model at {asked.page}; expected a directory, a "
            f"file, or ORG/NAME of a model there; for a private one log in: {login}"
        )
    if isinstance(error, RevisionNotFoundError):
        return VBError(
            f"{asked.repo}: no revision {asked.revision!r}; expected a branch, tag or commit of {asked.page}"
        )
    if is_download:
        return VBError(
            f"{asked.repo}: the download broke off: {_said(error)}; the same command resumes, what has come is kept in "
            f"{constants.HF_HUB_CACHE}"
        )
    folder = asked.repo.partition("/")[2]
    return VBError(
        f"{asked.text}: no such file or directory here, not in the Hub's cache ({constants.HF_HUB_CACHE}), and "
        f"{_reason(error)}; on a machine with access: hf download {asked.repo} --local-dir {folder}"
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, OfflineModeIsEnabled):
        return "the Hub may not be asked (HF_HUB_OFFLINE is set)"
    return f"{constants.ENDPOINT} does not answer ({_said(error)})"


def _said(error: BaseException) -> str:
    return first_line(error).rstrip(".") or type(error).__name__


@contextlib.contextmanager
def _bars(show: bool) -> Iterator[None]:
    if show or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


# -- choosing ---------------------------------------------------------------------------------------------------------


def _chosen(files: Collection[str], asked: _HubName, path_of: Callable[[str], Path], need: Need) -> tuple[str, ...]:
    """Return the files of a repository to fetch; the first one tells the path of the model.

    Repositories hold weights several times over (safetensors, pickled, consolidated, GGUF, ONNX): of these, the files
    that vbrt reads. path_of: local path of one of the files, which may have to be fetched.
    """
    companions = tuple(file for file in files if "/" not in file and file.endswith(_COMPANIONS))
    has_weights = any(name in files for name in (MANIFEST, *_WEIGHTS))
    if asked.part or (not has_weights and any(file.endswith(GGUF_SUFFIX) for file in files)):
        return (*_gguf_parts(files, asked), *companions)
    if need == "config" and _CONFIG in files:
        named = read_json(path_of(_CONFIG), _MAX_INDEX_BYTES)
        by_weights = isinstance(named, dict) and not {"dtype", "torch_dtype"} & named.keys()
        shards = sorted(file for file in files if "/" not in file and file.endswith(".safetensors"))
        return (_CONFIG, *shards[:1]) if by_weights else (_CONFIG,)
    if _CONFIG not in files:
        raise CheckpointError(f"{asked.repo}: no {_CONFIG} among its files; expected a model of transformers, or GGUF")
    if MANIFEST in files:
        parts = {file for file in files if "/" not in file and file.endswith(".safetensors")}
    elif kept := next((name for name in _WEIGHTS if name in files), ""):
        parts = _shards(path_of(kept), asked) if kept.endswith(".json") else {kept}
    else:
        raise CheckpointError(
            f"{asked.repo}: no weights that vbrt reads among its {len(files)} files; expected {SINGLE}, {INDEX}, "
            f"{PICKLED[0]} or GGUF"
        )
    return (_CONFIG, *sorted(parts), *(file for file in companions if file != _CONFIG))


def _shards(index: Path, asked: _HubName) -> set[str]:
    found = read_json(index, _MAX_INDEX_BYTES)
    shards = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise CheckpointError(f"{asked.repo}: {index.name}: damaged: no weight_map of file names in it")
    return set(shards.values())


def _gguf_parts(files: Collection[str], asked: _HubName) -> list[str]:
    """Return a GGUF file and its further parts, by the name or quantization asked for, or because it is the only one.

    Raises CheckpointError: none, or several.
    """
    firsts = {
        shard_paths(Path(file))[0].as_posix()
        for file in files
        if file.endswith(GGUF_SUFFIX) and not file.rpartition("/")[2].startswith("mmproj")
    }
    if asked.part.endswith(GGUF_SUFFIX):
        found = firsts & {shard_paths(Path(asked.part))[0].as_posix()}
    elif asked.part:  # "Q8_0" is neither "IQ8_0" nor "Q8_0_L"
        ends = re.compile(rf"(^|[-._/]){re.escape(asked.part)}(-\d+-of-\d+)?\{GGUF_SUFFIX}$", re.IGNORECASE)
        found = {file for file in firsts if ends.search(file)}
    else:
        found = firsts
    if len(found) != 1:
        what = f"{len(found)} GGUF files" if found else "no GGUF file"
        which = f" {asked.part}" if asked.part else ""
        expected = _some(sorted(found or firsts)) or "a repository with GGUF files"
        raise CheckpointError(
            f"{asked.repo}: {what}{which}; expected {asked.repo}:FILE or {asked.repo}:QUANTIZATION, of {expected}"
        )
    return [part.as_posix() for part in shard_paths(Path(found.pop()))]


def _some(names: Collection[str]) -> str:
    shown = list(names)[:_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
