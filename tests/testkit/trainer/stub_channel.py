"""A channel for tests of worker processes: the operator's four paths over plain HTTP, and `choose` instead of a plan.

It publishes the first generation when all workers are ready, and a wider one whenever the leader's offers allow it.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

from pipetransformer_contract.choose import Bounds, OnPack, Packing, Present, choose
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Generation, Heartbeat, Member, Ready, Report, ResizeReason
from pipetransformer_contract.wire import ChannelPath


class StubChannel:
    """Serves until `close`. While `down` is set it answers 503 to everything, as a channel without its operator
    does. Once the job has ended, by the leader's word or by `end`, it answers 410 to polls and heartbeats.

    Attributes:
        told: workers whose heartbeats were answered so.
        asks_for: token of the checkpoint that answers ask for; empty for none.
        asked_for_members: workers that asked for a generation with all its members.
    """

    def __init__(
        self,
        num_workers: int,
        initial: Layout,
        on_pack: OnPack = OnPack.WIDEN,
        packing: Packing = Packing.PAPER,
    ) -> None:
        self.reports: list[Report] = []
        self.beats: list[Heartbeat] = []
        self.waiting: set[str] = set()
        self.told: set[str] = set()
        self.asked_for_members: list[str] = []
        self.polls = 0
        self.refused = 0
        self.connections = 0
        self.generations: list[Generation] = []
        self.down = threading.Event()
        self._num_workers = num_workers
        self._initial = initial
        self._on_pack = on_pack
        self._packing = packing
        self._ready: dict[str, str] = {}
        self._ended = False
        self._stops = False
        self.asks_for = ""
        self._unheard: frozenset[str] = frozenset()
        self._condition = threading.Condition()
        self._server = _Server(("127.0.0.1", 0), self._handler_class())
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def outcome(self) -> str | None:
        """How the leader said that the job ended."""
        last = self.reports[-1] if self.reports else None
        return last.outcome.value if last is not None and last.outcome is not None else None

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self._ended or self.outcome is not None

    def end(self, unheard: Iterable[str] = ()) -> None:
        """The job has ended, whatever its leader says; `unheard` do not beat before their group breaks."""
        with self._condition:
            self._ended, self._unheard = True, frozenset(unheard)
            self._condition.notify_all()

    def stop(self) -> None:
        """Workers that beat are told to leave a checkpoint and end."""
        self._stops = True

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until `condition` holds, checked whenever a worker says something."""
        with self._condition:
            return self._condition.wait_for(condition, timeout)

    def refuse(self) -> int:
        with self._condition:
            self.refused += 1
            self._condition.notify_all()
            return 503

    def ready(self, worker: str, ready: Ready) -> None:
        with self._condition:
            self._ready[worker] = ready.address
            if len(self._ready) == self._num_workers and not self.generations:
                self._publish(self._initial, ResizeReason.START)
            self._condition.notify_all()

    def generation(self, worker: str, after: int, timeout: float) -> Generation | None:
        def newest() -> Generation | None:
            named = [g for g in self.generations if worker in {m.name for m in [*g.members, *g.leavers]}]
            return named[-1] if named and named[-1].layout_generation > after else None

        with self._condition:
            self.waiting.add(worker)
            self.polls += 1
            self._condition.notify_all()
            self._condition.wait_for(lambda: newest() is not None or self.ended, timeout)
            return newest()

    def beat(self, worker: str, beat: Heartbeat) -> int | None:
        """The newest generation's number; None where the answer is that the job has ended."""
        with self._condition:
            self.beats.append(beat)
            tells = self.ended and (worker not in self._unheard or bool(beat.lost_peers))
            if tells:
                self.told.add(worker)
            self._condition.notify_all()
            return None if tells else len(self.generations)

    def report(self, report: Report) -> int:
        with self._condition:
            self.reports.append(report)
            present = self.generations[-1]
            current = Layout(present.stages, present.pipelines)
            bounds = Bounds(self._initial, 1, self._num_workers, 1, self._num_workers, report.bytes_budget)
            best = choose(
                report.offers,
                self._num_workers,
                bounds,
                on_pack=self._on_pack,
                packing=self._packing,
                present=Present(current, report.step_seconds, report.remaining_steps),
            )
            confirmed = report.layout_generation == present.layout_generation
            if best is not None and best != current and confirmed and not self.ended:
                self._publish(best, ResizeReason.PACK)
            self._condition.notify_all()
            return self.generations[-1].layout_generation

    def publish(self, layout: Layout, *, of_all: bool = False) -> None:
        """A generation that nobody offered; `of_all`: also of workers that are no members now."""
        with self._condition:
            self._publish(layout, ResizeReason.PACK, of_all=of_all)
            self._condition.notify_all()

    def _publish(self, layout: Layout, reason: ResizeReason, *, of_all: bool = False) -> None:
        everyone = [Member(name=name, uid=name, address=address) for name, address in sorted(self._ready.items())]
        present = everyone if of_all or not self.generations else self.generations[-1].members
        members = present[: layout.workers]
        number = len(self.generations) + 1
        self.generations.append(
            Generation(
                job_uid="job-uid",
                layout_generation=number,
                stages=layout.stages,
                pipelines=layout.pipelines,
                members=members,
                leavers=present[layout.workers :],
                leader=members[0].name,
                nonce=f"nonce-{number}",
                reason=reason,
            )
        )

    def _handler_class(self) -> type[BaseHTTPRequestHandler]:
        channel = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                channel.connections += 1
                super().setup()

            def do_GET(self) -> None:
                if channel.down.is_set():
                    return self._answer(channel.refuse())
                url = urlparse(self.path)
                assert url.path == ChannelPath.GENERATION
                query = parse_qs(url.query)
                worker = self.headers["X-Pipetransformer-Worker"]
                found = channel.generation(worker, int(query["after"][0]), float(query["timeoutSeconds"][0]))
                if found is not None and "members" in query:
                    channel.asked_for_members.append(worker)
                    return self._answer(200, found.to_wire())
                if found is not None:
                    return self._answer(200, found.notice().to_wire())
                return self._answer(410 if channel.ended else 204)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if channel.down.is_set():
                    return self._answer(channel.refuse())
                match self.path:
                    case ChannelPath.READY:
                        channel.ready(self.headers["X-Pipetransformer-Worker"], Ready.model_validate_json(body))
                        return self._answer(204)
                    case ChannelPath.HEARTBEAT:
                        worker = self.headers["X-Pipetransformer-Worker"]
                        newest = channel.beat(worker, Heartbeat.model_validate_json(body))
                        reply = {
                            "layoutGeneration": newest,
                            "stop": channel._stops,
                            "checkpointRequest": channel.asks_for,
                        }
                        return self._answer(410) if newest is None else self._answer(200, reply)
                    case ChannelPath.REPORT:
                        newest = channel.report(Report.model_validate_json(body))
                        reply = {"layoutGeneration": newest, "checkpointRequest": channel.asks_for}
                        return self._answer(200, reply)
                    case _:
                        return self._answer(404)

            def _answer(self, status: int, body: object | None = None) -> None:
                content = b"" if body is None else json.dumps(body).encode()
                self.send_response(status)
                if status != 204:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A worker that has gone hears no answer: that is no error of the channel."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
