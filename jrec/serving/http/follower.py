"""Takes over what is exported while a model is served: deltas that follow it, and a whole export in its place."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator

from jrec.serving.checks import is_finished, load_manifest
from jrec.serving.format import MANIFEST, ExportError, Manifest
from jrec.serving.model import Model

_Signature = tuple[tuple[str, int, int, int], ...]


class Follower:
    """Keeps a model at the newest of what is exported. One thread at a time may call it.

    Args:
      export: A whole export. Once another one is there, by ``jrec export --overwrite`` or a link that leads to another
        folder, that is loaded.
      deltas: A folder in which deltas appear, whatever they are called: the one that follows what is loaded is applied,
        and then the one that follows that. None for no deltas.
      load: Loads a whole export, ready for requests.
      report: Takes messages about deltas that are passed over.

    Attributes:
      model: What is loaded.
      folder: The export or delta that was taken last.
      passed_over: Folders of deltas that are none, and why.

    Raises:
      ExportError: If the export cannot be loaded. A delta that cannot be applied is said; what it follows is served.
    """

    def __init__(
        self,
        export: pathlib.Path,
        deltas: pathlib.Path | None,
        *,
        load: Callable[[pathlib.Path], Model],
        report: Callable[[str], None] = lambda message: None,
    ):
        self._export, self._deltas = export, deltas
        self._load, self._report = load, report
        self._manifests: dict[pathlib.Path, tuple[_Signature, Manifest]] = {}
        self._failed: dict[pathlib.Path, _Signature] = {}
        self.passed_over: dict[str, str] = {}
        self._load_whole(self._manifest(export))
        try:
            self._apply_deltas(again=True)
        except (ExportError, OSError) as problem:
            report(f"not taken over: {problem}")

    @property
    def written(self) -> float:
        """When what was taken last was written, by the time of its manifest: seconds since 1970."""
        return self._written

    def check(self, *, again: bool = False) -> list[pathlib.Path]:
        """Takes over what is new; returns the folders in order.

        Args:
          again: Whether what failed is tried again though none of its files has changed since.

        Raises:
          ExportError: If something cannot be taken over: what is served stays what it was, or what came before it.
          OSError: If a folder cannot be read.
        """
        taken = []
        # The whole export first: deltas that follow the old one are not those of the new one.
        with self._trying(self._export, again=again) as fit:
            if fit and (manifest := self._manifest(self._export)).id != self._whole:
                self._load_whole(manifest)
                taken.append(self._export)
        return taken + self._apply_deltas(again=again)

    def _load_whole(self, manifest: Manifest) -> None:
        model = self._load(self._export)
        self._whole = manifest.id
        self._now_serves(self._export, model)

    def _apply_deltas(self, *, again: bool) -> list[pathlib.Path]:
        applied = []
        while (delta := self._next_delta(again=again)) is not None:
            with self._trying(delta, again=again):
                self.model.apply(delta)
            self._now_serves(delta, self.model)
            applied.append(delta)
        return applied

    def _now_serves(self, folder: pathlib.Path, model: Model) -> None:
        self.model, self.folder, self._written = model, folder, (folder / MANIFEST).stat().st_mtime

    def _next_delta(self, *, again: bool) -> pathlib.Path | None:
        """The delta that follows what is loaded, if there is one."""
        following, said = [], {**self.passed_over}
        if again:
            self.passed_over.clear()
        for folder in sorted(self._deltas.iterdir()) if self._deltas is not None else ():
            if is_finished(folder) and not self._follows_another(folder):
                try:
                    with self._trying(folder, again=again) as fit:
                        if fit and self._manifest(folder).parent == self.model.manifest.id:
                            following.append(folder)
                except ExportError as problem:  # nobody knows whether it follows: others may
                    self.passed_over[str(folder)] = str(problem)
                    if said.get(str(folder)) != str(problem):
                        self._report(f"passes over {folder}: {problem}")
        if len(following) > 1:
            raise ExportError(
                f"{' and '.join(map(str, following))} all follow {self.model.manifest.id[:12]}, which is served; leave"
                " only one there"
            )
        return following[0] if following else None

    def _follows_another(self, folder: pathlib.Path) -> bool:
        """Whether a folder's manifest, which was read and has not changed since, is of no delta of what is loaded."""
        # Each look passes all deltas so far, of which there may be thousands: of these it takes the state of one file.
        known = self._manifests.get(folder)
        if known is None or known[0] != _signature(folder, [folder / MANIFEST]):
            return False
        return known[1].parent != self.model.manifest.id

    def _manifest(self, folder: pathlib.Path) -> Manifest:
        """A folder's manifest, read when its file has changed."""
        signature = _signature(folder, [folder / MANIFEST])
        known = self._manifests.get(folder)
        if known is None or known[0] != signature:
            known = self._manifests[folder] = signature, load_manifest(folder)
        return known[1]

    @contextlib.contextmanager
    def _trying(self, folder: pathlib.Path, *, again: bool) -> Iterator[bool]:
        """Gives whether a folder is worth a try: it did not fail yet, or has changed since. Notes that it fails."""
        # As the files are before the try: one that is copied while others are read must make the folder worth another.
        before = _signature(folder, folder.rglob("*"))
        fit = again or self._failed.get(folder) != before
        try:
            yield fit
        except BaseException:
            self._failed[folder] = before
            raise
        if fit:
            self._failed.pop(folder, None)


def _signature(folder: pathlib.Path, paths: Iterator[pathlib.Path] | list[pathlib.Path]) -> _Signature:
    """What differs when files of a folder change: their names, sizes, times and inodes."""
    files = []
    for path in paths:
        with contextlib.suppress(OSError):
            if path.is_file():
                state = path.stat()
                files.append((str(path.relative_to(folder)), state.st_size, state.st_mtime_ns, state.st_ino))
    return tuple(sorted(files))
