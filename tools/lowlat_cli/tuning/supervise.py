"""The parent of a tuning run: hands jobs to a child process and outlives whatever a candidate does to it.

Every event must come within a time limit. A candidate that hangs (the child is killed) or breaks the child (it ended,
or said so) is excluded with its reason, and a new child measures the rest. Where it happens while candidates take
turns, each is measured alone, so that the one to blame is found.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from .candidates import Candidate
from .jobs import Job, JobResult

#: The longest silence of a child: its start (imports, a CUDA context), and any later event.
START_LIMIT_S, EVENT_LIMIT_S = 180.0, 60.0


class TuneError(RuntimeError):
    """Nothing can be measured here: the child fails without a candidate to blame."""


class _Failure(Exception):
    """The child hung or ended. ``candidate``: the one that it was at, if any."""

    def __init__(self, reason: str, candidate: Candidate | None):
        super().__init__(reason)
        self.candidate = candidate


class _Child:
    """One process and the events that it has written so far."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._events: queue.Queue[dict | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def send(self, job: Job) -> None:
        try:
            self.process.stdin.write(json.dumps(job.to_json()) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; ``event`` says so

    def event(self, limit_s: float, candidate: Candidate | None) -> dict:
        """The next event. Raises _Failure when the child hangs, ends, or says that it is broken."""
        try:
            event = self._events.get(timeout=limit_s)
        except queue.Empty:
            raise _Failure(f"hung: nothing for {limit_s:g} s", candidate) from None
        if event is None:
            raise _Failure(f"crashed: the process ended with {self.process.wait()}", candidate)
        if event["event"] == "broken":
            raise _Failure(f"crashed: {event['reason']}", candidate)
        return event

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


class Supervisor:
    """Runs jobs in a child that ``command`` starts; a context manager that ends it.

    ``on_excluded(candidate, reason, job)`` is called once for every candidate that is left out. ``excluded``: all of
    them with their reasons; they are not measured again, at no shape, since a kernel that is wrong somewhere is not
    trusted elsewhere.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        start_limit_s: float = START_LIMIT_S,
        event_limit_s: float = EVENT_LIMIT_S,
        on_excluded: Callable[[Candidate, str, Job], None] = lambda candidate, reason, job: None,
    ):
        self._command, self._environment = command, environment
        self._start_limit_s, self._event_limit_s = start_limit_s, event_limit_s
        self._on_excluded = on_excluded
        self._child: _Child | None = None
        self.excluded: dict[Candidate, str] = {}
        self.restarts = 0

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *exception) -> None:
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def run(self, job: Job) -> JobResult:
        """The times of the candidates of ``job`` that are right. Raises TuneError when the child fails on its own."""
        while True:
            job = job.without(self.excluded)
            try:
                return self._attempt(job)
            except _Failure as failure:
                self._end()
                self.restarts += 1
                if failure.candidate is not None:
                    self._exclude(failure.candidate, str(failure), job)
                elif len(job.candidates) == 1:
                    self._exclude(job.candidates[0], str(failure), job)
                elif job.candidates:
                    return self._one_by_one(job)
                else:
                    raise TuneError(f"{job}: the measuring process {failure}") from None

    def _one_by_one(self, job: Job) -> JobResult:
        """Each candidate in a job of its own. Floor and baselines: those of the last."""
        times, last = {}, None
        for candidate in job.candidates:
            result = self.run(replace(job, candidates=(candidate,)))
            times |= result.times
            last = result
        return replace(last, times=times)

    def _attempt(self, job: Job) -> JobResult:
        if self._child is None:
            self._child = _Child(self._command, self._environment)
            self._child.event(self._start_limit_s, None)
        self._child.send(job)
        current: Candidate | None = None
        while True:
            event = self._child.event(self._event_limit_s, current)
            if event["event"] == "measured":
                return JobResult.from_json(event["result"])
            if event["event"] == "refused":
                self._exclude(Candidate.from_json(event["candidate"]), event["reason"], job)
            current = Candidate.from_json(event["candidate"]) if event["event"] == "begun" else None

    def _exclude(self, candidate: Candidate, reason: str, job: Job) -> None:
        self.excluded[candidate] = reason
        self._on_excluded(candidate, reason, job)
