"""Memory of this machine: how much of it is free; and memory that is brought in before a model asks for it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from threading import Thread

HUGE = 1 << 21  # bytes of a huge page
STEP = 8 * HUGE  # bytes that are brought in at a time
LEAST = 1 << 28  # bytes of a file that is worth it


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take without swapping; 4 GiB, a cautious value, where nothing tells.

    The least of what the machine has and what is left of the limits of its control groups (of versions 1 and 2) and of
    RLIMIT_AS and RLIMIT_DATA. Memory brought in ahead counts as free. `root`: of /proc and /sys.
    """
    done, reserved = sum(a.done for a in _begun), sum(a.size for a in _begun)
    rooms = [room + done for room in _group_rooms(root)] + [room + reserved for room in _rlimit_rooms()]
    with suppress(OSError, KeyError, ValueError):
        rooms.append(_sizes(root / "proc/meminfo")["MemAvailable:"] * 1024 + done)
    return max(0, min(rooms, default=4 << 30))


# By version of control groups: where they are mounted, their limits and use, and how memory.stat names files' pages.
_GROUPS: dict[int, tuple[tuple[str, ...], tuple[str, ...], str, str, str]] = {
    1: (("memory",), ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_", "mapped_file"),
    2: (("", "unified"), ("memory.max", "memory.high"), "memory.current", "", "file_mapped"),
}


def _group_rooms(root: Path) -> Iterator[int]:
    """Bytes left in each memory control group that this process is in."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 1 and "memory" not in controllers.split(","):
            continue
        mounts, limits, usage, total, mapped = _GROUPS[version]
        # In a container the path may be the host's; then only the mount itself is there, and it is the container's.
        parts = [part for part in PurePosixPath(path.lstrip("/")).parts if part != ".."]
        folders = [(root / "sys/fs/cgroup" / m).joinpath(*parts[:n]) for m in mounts for n in range(len(parts) + 1)]
        for folder in folders:
            found: list[int] = []
            for limit in limits:
                with suppress(OSError, ValueError):  # "max" is no number
                    found.append(int((folder / limit).read_text()))
            if not found:
                continue
            with suppress(OSError, ValueError, KeyError):
                held, stat = int((folder / usage).read_text()), _sizes(folder / "memory.stat")
                # Pages of files that nobody has mapped are dropped when memory is needed.
                files = stat[f"{total}inactive_file"] + stat[f"{total}active_file"] - stat[f"{total}{mapped}"]
                yield min(found) - held + max(0, files)


def _rlimit_rooms() -> Iterator[int]:
    """Bytes left of this process's own limits, which count reserved memory, too."""
    with suppress(ImportError, OSError):  # other systems than Linux
        import resource

        pages = [int(x) * resource.getpagesize() for x in Path("/proc/self/statm").read_text().split()]
        for kind, held in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
            if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
                yield limit - held


def _sizes(file: Path) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    return {words[0]: int(words[1]) for line in file.read_text().splitlines() if len(words := line.split()) > 1}


class Ahead:
    """Memory on huge pages that a thread brings in, from its start, until `stop`.

    The first touch of a page takes the kernel up to three seconds a gigabyte, as long as all the rest of loading; and
    importing PyTorch keeps only one core busy.
    """

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, -(-size // STEP) * STEP + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._place = (ctypes.c_char * 0).from_buffer(self.memory)  # keeps the mapping while the thread runs
        self.start = -ctypes.addressof(self._place) % HUGE
        self.size = len(self.memory) - HUGE
        self.done, self._stopped = 0, False
        with suppress(OSError):  # a kernel without huge pages: normal pages are used
            self.memory.madvise(mmap.MADV_HUGEPAGE, self.start, self.size)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        begin = ctypes.addressof(self._place) + self.start
        while not self._stopped and self.done < self.size:
            # Other threads run meanwhile. `madvise` to populate pages would hold a lock that importing needs.
            ctypes.memset(begin + self.done, 0, STEP)
            self.done += STEP

    def stop(self) -> None:
        """End it: from now on the memory is the caller's."""
        self._stopped = True
        self._thread.join()

    def give_back(self, first: int) -> None:
        """Give back the memory from byte `first` on."""
        first = -(-first // HUGE) * HUGE
        if first < self.size:
            self.memory.madvise(mmap.MADV_DONTNEED, self.start + first, self.size - first)


_begun: list[Ahead] = []


def bring_in(model: str) -> None:
    """Begin to bring in memory for the weights of a local GGUF file, if it is large and there is memory for two."""
    path = Path(model)
    with suppress(OSError, ValueError):
        size = path.stat().st_size if path.is_file() else 0
        if hasattr(mmap, "MADV_HUGEPAGE") and size >= LEAST and 2 * size < available_memory():
            _begun.append(Ahead(size))


def brought_in() -> Ahead | None:
    """What `bring_in` has begun, for its first caller."""
    return _begun.pop() if _begun else None
