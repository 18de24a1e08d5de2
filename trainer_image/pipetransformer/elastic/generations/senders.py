"""Sends heartbeats and the leader's reports to the operator, in threads, so that training continues while it is away.

The training thread waits for the operator only if the worker has no generation to train in.
"""

import logging
import threading
import time
from typing import Protocol

from pipetransformer_contract.messages import Heartbeat, Report

from .channel_client import Backoff, ChannelClient, ChannelUnavailableError, JobEndedError

logger = logging.getLogger(__name__)

#: Pauses between heartbeats, and between reports, unless the operator asks for other ones.
HEARTBEAT_SECONDS = 2.0
REPORT_SECONDS = 5.0


class GenerationListener(Protocol):
    """Hears of the numbers of published generations. `ChannelSource` implements it."""

    def on_published(self, layout_generation: int) -> None: ...


class CheckpointSubject(Protocol):
    """The worker that the operator asks for a checkpoint."""

    def on_checkpoint_asked(self, token: str) -> None:
        """Called with each answer. `token` is that of the checkpoint that the operator asks for; empty without one."""


class HeartbeatSubject(CheckpointSubject, Protocol):
    """The worker that a heartbeat speaks for."""

    def heartbeat(self) -> Heartbeat:
        """Return the next heartbeat."""
        ...

    def on_job_ended(self) -> None:
        """Called when the operator answers that the job has ended. No heartbeat follows."""

    def on_stop_asked(self) -> None:
        """Called with each answer that asks this worker to exit once a last checkpoint is durable."""


class HeartbeatSender:
    """Sends heartbeats in a thread, at the pace that the operator asks for, until `stop` or until the job ends."""

    def __init__(self, channel: ChannelClient, listener: GenerationListener, subject: HeartbeatSubject) -> None:
        self._channel = channel
        self._listener = listener
        self._subject = subject
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat_now(self) -> None:
        """Send the next heartbeat at once, for example because a peer was lost."""
        self._wake.set()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()

    def _run(self) -> None:
        pause = HEARTBEAT_SECONDS
        while not self._stop.is_set():
            asked = 0.0
            try:
                reply = self._channel.heartbeat(self._subject.heartbeat())
                self._listener.on_published(reply.layout_generation)
                pause = reply.next_seconds or HEARTBEAT_SECONDS
                self._subject.on_checkpoint_asked(reply.checkpoint_request)
                if reply.stop:
                    self._subject.on_stop_asked()
            except JobEndedError as error:
                logger.info("no more heartbeats: %s", error)
                self._subject.on_job_ended()
                return
            except ChannelUnavailableError as error:
                logger.info("cannot send a heartbeat: %s", error)
                asked = error.retry_after
            self._wake.wait(max(pause, asked))
            self._wake.clear()


class ReportSender:
    """Sends the newest report in a thread, again and again until the operator acknowledges it.

    An urgent report is sent at once, any other one at the pace that the operator asks for.
    """

    def __init__(self, channel: ChannelClient, listener: GenerationListener, subject: CheckpointSubject) -> None:
        self._channel = channel
        self._listener = listener
        self._subject = subject
        self._lock = threading.Condition()
        self._latest: Report | None = None
        self._acknowledged: Report | None = None
        self._urgent = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, report: Report, *, urgent: bool) -> None:
        """Send this report in place of the one before. `urgent`: send it at once. Never blocks."""
        with self._lock:
            self._latest = report
            self._urgent = self._urgent or urgent
            self._lock.notify_all()

    def forget(self) -> None:
        """Drop the newest report. Call this when another worker has become the leader."""
        with self._lock:
            self._latest = None

    def flush(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds until the newest report is acknowledged. Returns whether it was."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._pending or self._stop.is_set(), timeout)

    @property
    def _pending(self) -> bool:
        return self._latest is not None and self._acknowledged is not self._latest

    def stop(self) -> None:
        self._stop.set()
        with self._lock:
            self._lock.notify_all()

    def _run(self) -> None:
        backoff = Backoff(self._stop)
        last, pause = 0.0, REPORT_SECONDS
        while not self._stop.is_set():
            # Wait until a report is due.
            with self._lock:
                due = last + pause - time.monotonic()
                pending = self._pending
                if not pending or (not self._urgent and due > 0):
                    self._lock.wait(max(0.05, due) if pending else None)
                    continue
                report, self._urgent = self._latest, False
            assert report is not None
            # Send it. If that fails, send the report that is newest by then. If the job has ended, count it as sent.
            try:
                reply = self._channel.report(report)
                self._listener.on_published(reply.layout_generation)
                self._subject.on_checkpoint_asked(reply.checkpoint_request)
                pause = reply.next_seconds or REPORT_SECONDS
            except JobEndedError as error:
                logger.info("the operator takes no more reports: %s", error)
            except ChannelUnavailableError as error:
                logger.info("cannot send the report: %s; trying again", error)
                with self._lock:
                    self._urgent = True
                backoff.wait(error.retry_after)
                continue
            backoff.reset()
            last = time.monotonic()
            with self._lock:
                self._acknowledged = report
                self._lock.notify_all()
