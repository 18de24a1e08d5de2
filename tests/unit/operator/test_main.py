"""The program of the operator: what keeps it from its work is said in one line."""

import os
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipetransformer_operator.__main__ import RELEASE_BUDGETS, main
from pipetransformer_operator.channel.tls.certificate import new_authority
from tests.testkit.operator.kubeconfig import kubeconfig

pytestmark = pytest.mark.timeout(60)


def end_of(arguments: list[str], variables: dict[str, str]) -> tuple[int, str]:
    """Runs the program. Returns its exit code and what it writes to standard error."""
    own = {
        "PIPETRANSFORMER_CHANNEL_URL": "https://operator.system.svc:8443",
        "POD_NAMESPACE": "system",
        "PIPETRANSFORMER_HOST": "127.0.0.1",
    }
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KUBERNETES_")}
    command = [sys.executable, "-m", "pipetransformer_operator", *arguments]
    ended = subprocess.run(command, env=environment | own | variables, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("arguments", [[], [RELEASE_BUDGETS]])
def test_without_a_cluster_it_says_what_to_set(arguments: list[str], tmp_path: Path) -> None:
    code, said = end_of(arguments, {"KUBECONFIG": str(tmp_path / "none")})
    assert (code, said) == (
        1,
        f"error: no cluster found: there is no kubeconfig {tmp_path / 'none'}. This is not a pod with a ServiceAccount"
        " either. Set KUBECONFIG to the path of a kubeconfig\n",
    )


def test_an_api_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    code, said = end_of([RELEASE_BUDGETS], {"KUBECONFIG": kubeconfig(tmp_path, "http://127.0.0.1:9")})
    assert code == 1 and said.count("\n") == 1
    assert said.startswith("error: GET /apis/policy/v1/poddisruptionbudgets: ClientConnectorError")


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    authority = new_authority(datetime.now(UTC))
    for name, content in (("ca.crt", authority.certificate), ("tls.crt", authority.certificate)):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "tls.key").write_bytes(authority.key)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables = {
            "KUBECONFIG": kubeconfig(tmp_path, "http://127.0.0.1:9"),
            "PIPETRANSFORMER_CERTIFICATE_DIR": str(tmp_path),
            "PIPETRANSFORMER_CHANNEL_PORT": port,
        }
        code, said = end_of([], variables)
    assert code == 1 and "Traceback" not in said
    assert f"error: cannot listen on port {port}: [Errno 98] Address already in use" in said


def test_a_misspelled_argument_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipetransformer_operator", "release-budget"])
    assert main() == 2
    assert capsys.readouterr().err == "error: expected release-budgets or no argument, found release-budget\n"
