"""What a tuning run has measured, line by line, so that another one goes on where it stopped.

Lines belong to one kind of machine and one state of the code (generation, device, versions, kernel sources): others in
the same file are left alone and not used. Nothing is rewritten; a last line that was cut by a crash is dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from lowlat_gemm.arch import Arch, DeviceProperties
from lowlat_gemm.kernels.store import source_hash

from .candidates import Candidate
from .jobs import Job, JobResult


def run_key(arch: Arch, device: DeviceProperties, versions: Mapping[str, str | None]) -> dict:
    """What must be equal for times to be of one run: another machine of the same kind continues it."""
    bandwidth = None if device.bandwidth_gbs is None else round(device.bandwidth_gbs, -2)
    return {
        "arch": arch.name,
        "device": [device.name, device.sm_count, bandwidth],
        "versions": {name: version for name, version in versions.items() if version is not None},
        "kernels": source_hash()[:24],
    }


class Journal:
    """The results and exclusions of ``key`` in a file; None as ``path``: in memory alone.

    Raises ValueError, naming file and line, for a line that is whole and no JSON object.
    """

    def __init__(self, path: Path | None, key: Mapping):
        self._key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self._results: dict[str, JobResult] = {}
        #: Candidates that are not measured again, with the reason.
        self.excluded: dict[Candidate, str] = {}
        #: Lines of other machines, versions or kernels.
        self.foreign = 0
        self._stream = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_cut_line(path)
            self._read(path)
            self._stream = open(path, "a", encoding="utf-8")
            self._append({"what": key})

    def _read(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for number, line in enumerate(text.splitlines(), 1):
            try:
                entry = json.loads(line)
                if entry["key"] != self._key:
                    self.foreign += 1
                elif "result" in entry:
                    self._results[entry["job"]] = JobResult.from_json(entry["result"])
                elif "reason" in entry:
                    self.excluded[Candidate.from_json(entry["candidate"])] = entry["reason"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a journal's line ({error!r}): {line[:80]!r}") from None

    def _append(self, entry: Mapping) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps({"key": self._key} | dict(entry)) + "\n")
            self._stream.flush()

    def result(self, job: Job) -> JobResult | None:
        """What ``job`` gave, here or on another machine of the kind; None when it was not finished."""
        return self._results.get(job.identity)

    def add(self, job: Job, result: JobResult) -> None:
        self._results[job.identity] = result
        self._append({"job": job.identity, "about": str(job), "result": result.to_json()})

    def exclude(self, candidate: Candidate, reason: str, job: Job) -> None:
        self.excluded[candidate] = reason
        self._append({"candidate": candidate.to_json(), "reason": reason, "about": str(job)})

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def _drop_cut_line(path: Path) -> None:
    """Ends the file with its last whole line."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)
