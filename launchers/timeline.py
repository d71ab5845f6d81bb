"""The launcher's part in a timeline: a place for the parts before the job begins, one file of them when it is over."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvmpi.errors import ConfigError, names_in_words
from kvmpi.trace import merge, parts


class Timeline:
    """The timeline of one job, to be made of what its processes write to ``FILE.parts``.

    Raises:
        ConfigError: nothing can be written there, or what is there is no file.
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        parts.require_file(self._path)
        folder = Path(parts.folder_of(self._path))
        try:
            folder.mkdir(exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY)  # as long as this job runs
            if _is_taken(self._lock):
                raise ConfigError(
                    f"--timeline {path}: another job, which still runs, writes its timeline there; wait for its end, "
                    "or name another file"
                )
            for old in folder.glob("*.part"):  # of a job whose launcher was killed
                old.unlink()
        except OSError as error:
            raise ConfigError(f"--timeline {path}: {folder} cannot be written to: {error.strerror}") from None

    @classmethod
    def of(cls, path: str) -> Timeline | None:
        """None where no timeline is wanted."""
        return cls(path) if path else None

    def make(self, job_id: str) -> str:
        """Make the file, whatever became of the job; what to say about it."""
        try:
            merged = merge.merge(self._path, job_id)
        except Exception as error:  # whatever it is, it must not change how the job has ended
            try:
                Path(parts.folder_of(self._path)).rmdir()  # nothing is in there
            except OSError:
                pass
            return f"no timeline: {error}" if isinstance(error, ConfigError) else f"no timeline: {error!r}"
        text = f"timeline of {len(merged.processes)} processes, {merged.spans} spans: {self._path}"
        if merged.dropped:
            text += f"; {merged.dropped} more were dropped, see KVMPI_TIMELINE_SPANS"
        if merged.truncated:
            text += f"; what {names_in_words(merged.truncated)} wrote is not whole"
        if merged.unaligned:
            text += f"; nobody has compared the clocks of {names_in_words(merged.unaligned)} with the others'"
        return text


def _is_taken(folder: int) -> bool:
    """Whether another job has locked a folder; else it is locked from now on, where its file system knows locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
