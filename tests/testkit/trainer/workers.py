"""Workers as processes, and an operator's channel that they talk to."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from pipetransformer.__main__ import main
from pipetransformer_contract.choose import OnPack, Packing
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.spec import TrainerSpec
from pipetransformer_contract.wire import Env
from tests.testkit import forked
from tests.testkit.forked import Forked
from tests.testkit.trainer.stub_channel import StubChannel

SPEC: dict[str, Any] = {
    "model": {"name": "vit", "numLayers": 4, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4},
    "data": {"name": "digits"},
    "training": {"epochs": 4, "globalBatchSize": 100},
    "freeze": {"policy": "PaperSchedule", "alpha": 0.5},
    "pipeline": {"stages": 2, "microBatchSize": 25},
    "numShards": 2,
    "workers": 2,
}


class Workers:
    """Processes of `python -m pipetransformer` and the channel they talk to, which begins with two of them."""

    def __init__(self, tmp_path: Path, on_pack: OnPack, packing: Packing, channel: type[StubChannel]) -> None:
        self.folder = tmp_path
        self.channel = channel(2, Layout(2, 1), on_pack, packing)
        self._processes: list[Forked] = []
        forked.context(*forked.TRAINER)

    def start(self, spec: dict[str, Any], count: int = 2) -> None:
        job = TrainerSpec.model_validate(spec).to_environment()
        for number in range(len(self._processes), len(self._processes) + count):
            environment = {
                Env.JOB_NAMESPACE: "ns",
                Env.JOB_NAME: "job",
                Env.JOB_UID: "job-uid",
                Env.JOB_SPEC: job,
                Env.WORKER_NAME: f"job-w{number}",
                Env.WORKER_UID: f"uid-{number}",
                Env.WORKER_ADDRESS: "127.0.0.1",
                Env.CHANNEL_URL: self.channel.url,
                Env.RUN_DIR: str(self.folder / "run"),
                Env.TERMINATION_LOG: str(self.folder / f"termination-{number}"),
            }
            self._processes.append(Forked(main, os.environ | environment, self.folder / f"log-{number}"))

    def wait(self) -> list[int]:
        return [process.join(200) for process in self._processes]

    def wait_for(self, number: int, seconds: float = 15) -> int:
        return self._processes[number].join(seconds)

    def signal(self, number: int, what: signal.Signals = signal.SIGTERM) -> None:
        self._processes[number].send_signal(what)

    def termination(self, number: int) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / f"termination-{number}").read_text())
        return content

    def log(self, number: int) -> str:
        return (self.folder / f"log-{number}").read_text()

    def close(self) -> None:
        for number, process in enumerate(self._processes):
            process.kill()
            process.join()
            print(self.log(number))
        self.channel.close()
