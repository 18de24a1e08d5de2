"""A worker without torch: it speaks the channel as a trainer does, and its training is a script.

Run this file as a program with the environment of a worker. The leader takes steps up to the number in
`RUN_DIR/advance-to`, freezes where `freeze.boundaries` says, and succeeds at `training.steps`. What it must share with
the next leader (step and boundary) lies in `RUN_DIR/scripted.json`.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from pipetransformer_contract.messages import (
    DurableCheckpoint,
    Generation,
    Heartbeat,
    HeartbeatReply,
    Offer,
    Outcome,
    Ready,
    Report,
    ReportReply,
)
from pipetransformer_contract.spec import TrainerSpec
from pipetransformer_contract.wire import ChannelPath, Env, Wire

RETRY_SECONDS = 0.05
BYTES_PER_BLOCK = 100


class JobEnded(Exception):
    """The channel says that the job has ended."""


class ToldToStop(Exception):
    """The channel says that this worker is to leave a checkpoint and end."""


class Worker:
    """One scripted worker."""

    def __init__(self) -> None:
        self.name = os.environ[Env.WORKER_NAME]
        self.uid = os.environ[Env.WORKER_UID]
        self.job_uid = os.environ[Env.JOB_UID]
        self.spec = TrainerSpec.model_validate_json(os.environ[Env.JOB_SPEC])
        self.run_dir = Path(os.environ[Env.RUN_DIR])
        self.generation: Generation | None = None
        self.newest = 0

    def run(self) -> int:
        """Lives a worker's life and returns its exit code."""
        try:
            while True:
                self.join()
                assert self.generation is not None
                if self.uid not in {member.uid for member in self.generation.members}:
                    left = self.generation.layout_generation
                    self.call("POST", ChannelPath.HEARTBEAT, Heartbeat(layout_generation=left, waiting_after=left))
                    continue
                if self.generation.leader == self.name:
                    self.lead()
                else:
                    self.follow()
        except JobEnded:
            return 0
        except ToldToStop:
            step, boundary = self.load()
            assert self.generation is not None
            if self.generation.leader == self.name:
                self.report(step, boundary)
            said = {"outcome": "Left", "reason": "Stopped"} | ({"savedStep": step} if self.spec.checkpoint else {})
            Path(os.environ[Env.TERMINATION_LOG]).write_text(json.dumps(said))
            return 0

    def join(self) -> None:
        """Waits for a generation newer than the present one."""
        present = self.generation.layout_generation if self.generation else 0
        while True:
            self.call("POST", ChannelPath.READY, Ready(address="127.0.0.1:1"))
            # It hosts no store, so it asks as one whose leader is silent.
            body = self.call("GET", f"{ChannelPath.GENERATION}?after={present}&timeoutSeconds=5&members=true")
            if body:
                self.generation = Generation.model_validate_json(body)
                self.newest = self.generation.layout_generation
                return

    def follow(self) -> None:
        """Beats until a newer generation is published or the job ends."""
        assert self.generation is not None
        present = self.generation.layout_generation
        while self.newest <= present:
            self.newest = self.beat(present, 0)
            if self.call("GET", f"{ChannelPath.GENERATION}?after={present}&timeoutSeconds=1"):
                self.newest = present + 1

    def lead(self) -> None:
        """Takes steps until a newer generation is published or the last step is done."""
        assert self.generation is not None
        present = self.generation.layout_generation
        step, boundary = self.load()
        self.report(step, boundary)
        while self.newest <= present:
            if step == self.spec.training.steps:
                self.report(step, boundary, Outcome.SUCCEEDED)
                raise JobEnded
            if step >= self.allowed():
                self.newest = self.beat(present, step)
                time.sleep(RETRY_SECONDS)
                continue
            step += 1
            frozen, _ = self.frozen(step)
            self.save(step, frozen)
            if frozen != boundary:
                boundary = frozen
                self.report(step, boundary)

    def beat(self, present: int, step: int) -> int:
        """Gives a sign of life; returns the newest published generation."""
        beat = Heartbeat(layout_generation=present)
        reply = HeartbeatReply.model_validate_json(self.call("POST", ChannelPath.HEARTBEAT, beat))
        if reply.stop:
            raise ToldToStop
        return reply.layout_generation

    def frozen(self, step: int) -> tuple[int, int]:
        """Frozen blocks after `step`, and since which step."""
        reached = [(point.step, point.boundary) for point in self.spec.freeze.boundaries if point.step <= step]
        since, boundary = max(reached, default=(0, 0))
        return boundary, since

    def report(self, step: int, boundary: int, outcome: Outcome | None = None) -> None:
        """Sends a report until it is acknowledged."""
        assert self.generation is not None
        layers, stages = self.spec.model.num_layers, self.spec.pipeline.stages
        halvings = [stages >> shift for shift in range(stages.bit_length()) if stages % (1 << shift) == 0]
        checkpoint = DurableCheckpoint(step=step, boundary=boundary, min_stages=1) if self.spec.checkpoint else None
        report = Report(
            job_uid=self.job_uid,
            layout_generation=self.generation.layout_generation,
            step=step,
            boundary=boundary,
            boundary_step=self.frozen(step)[1],
            num_layers=layers,
            bytes_budget=-(-layers // stages) * BYTES_PER_BLOCK,
            offers=[Offer(stages=k, bytes_per_worker=-(-(layers - boundary) // k) * BYTES_PER_BLOCK) for k in halvings],
            checkpoint=checkpoint,
            outcome=outcome,
        )
        self.newest = ReportReply.model_validate_json(self.call("POST", ChannelPath.REPORT, report)).layout_generation

    def allowed(self) -> int:
        """The step up to which the test lets the job train."""
        file = self.run_dir / "advance-to"
        return int(file.read_text() or 0) if file.exists() else 0

    def load(self) -> tuple[int, int]:
        """Step and boundary that the leader before left."""
        file = self.run_dir / "scripted.json"
        if not file.exists():
            return 0, 0
        step, boundary = json.loads(file.read_text())
        return step, boundary

    def save(self, step: int, boundary: int) -> None:
        """Leaves step and boundary to the next leader."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        draft = self.run_dir / f"scripted.{self.name}"
        draft.write_text(json.dumps([step, boundary]))
        draft.replace(self.run_dir / "scripted.json")

    def call(self, method: str, path: str, message: Wire | None = None) -> bytes:
        """One request, repeated while the channel is away."""
        while True:
            try:
                return self.call_once(method, path, message)
            except urllib.error.HTTPError as error:
                if error.code == 410:
                    raise JobEnded from error
                print(f"{method} {path}: {error.code} {error.read().decode()}", file=sys.stderr, flush=True)
            except OSError as error:
                print(f"{method} {path}: {error}", file=sys.stderr, flush=True)
            time.sleep(RETRY_SECONDS)

    def call_once(self, method: str, path: str, message: Wire | None = None) -> bytes:
        """One request."""
        token = Path(os.environ[Env.CHANNEL_TOKEN_FILE]).read_text()
        authority = os.environ.get(Env.CHANNEL_CA_FILE)
        request = urllib.request.Request(
            os.environ[Env.CHANNEL_URL] + path,
            method=method,
            data=json.dumps(message.to_wire()).encode() if message else None,
            headers={
                "Authorization": f"Bearer {token}",
                "X-Pipetransformer-Job": f"{os.environ[Env.JOB_NAMESPACE]}/{os.environ[Env.JOB_NAME]}",
                "X-Pipetransformer-Worker": self.name,
            },
        )
        context = ssl.create_default_context(cafile=authority) if authority else None
        with urllib.request.urlopen(request, timeout=30, context=context) as response:
            return bytes(response.read())


def main() -> int:
    """Runs a worker and returns its exit code; `SCRIPTED_REFUSAL` is what it has against its spec."""
    if os.environ.get("SCRIPTED_REFUSAL"):
        refusal = {"outcome": "Failed", "reason": "InvalidSpec", "message": os.environ["SCRIPTED_REFUSAL"]}
        Path(os.environ[Env.TERMINATION_LOG]).write_text(json.dumps(refusal))
        return 2
    return Worker().run()


if __name__ == "__main__":
    sys.exit(main())
