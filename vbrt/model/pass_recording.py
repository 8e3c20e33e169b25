"""Recording of a pass as a CUDA graph in which the CPU computes some products."""

import contextlib
import functools
from collections.abc import Collection, Sequence
from types import TracebackType

from vbrt.host import accelerator
from vbrt.model.expert_cache import ExpertCache
from vbrt.model.hosting import Hosting
from vbrt.tiers import Recording, TierStack

__all__ = ["PassRecording"]


class PassRecording(Recording):
    """`Recording` whose replays announce their posts to the CPU; it ends when other weights are hosted.

    Args:
        hostings: of the models that a pass may belong to.
        caches: of their experts, which hear of replays.
    """

    def __init__(
        self,
        stack: TierStack,
        phase: str,
        keys: Collection[str] | None,
        hostings: Sequence[Hosting],
        caches: Sequence[ExpertCache],
    ) -> None:
        super().__init__(stack, phase, keys)
        self._caches = caches
        self._hostings, self._capture = hostings, contextlib.ExitStack()
        self._posts: list[tuple[Hosting, int]] = []
        self._versions = [hosting.version for hosting in hostings]

    def __enter__(self) -> "PassRecording":
        super().__enter__()
        self._posts.clear()
        for hosting in self._hostings:
            counted = self._capture.enter_context(hosting.captured())
            self._capture.callback(lambda hosting=hosting, counted=counted: self._posts.append((hosting, counted())))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._capture.close()
        super().__exit__(kind, error, trace)

    def replay(self, graph: accelerator.Graph) -> bool:
        """See `Recording.replay`.

        Raises:
            KernelError: an earlier product was not answered by the CPU.
            TierError: pages of experts did not come from the drive in an earlier pass.
        """
        for cache in self._caches:
            cache.begin_replay()
        posts = [(hosting, count) for hosting, count in self._posts if count]
        if posts and self._versions != [hosting.version for hosting in self._hostings]:
            self._ended = self._ended or "the CPU computes with other weights since the recording"
        replay = functools.partial(super().replay, graph)
        for hosting, count in posts:
            replay = functools.partial(hosting.replayed, count, replay)
        return replay()
