"""Other launchers: Slurm, Kubernetes, SkyPilot, the image. Their commands are accepted by the trainer.

They read its exit status, by the list of all exit statuses.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.launching import (
    REPOSITORY,
    copy_loop,
    statuses,
    with_outcome,
)
from zero.commands.cli import compose
from zero.hosts.signals import COMPANIONS, PREEMPTED, SIGNALS

EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"


def test_statuses_of_signals() -> None:
    """The list has the status of each signal that stops a trainer, and the one after a saved checkpoint."""
    assert {*with_outcome("stopped")} == {PREEMPTED, *(128 + number for number in (*SIGNALS, *COMPANIONS))}


def test_statuses_in_the_documentation() -> None:
    page = (REPOSITORY / "docs" / "reference" / "exit-statuses.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.+) \|$", page, re.MULTILINE)
    assert [(int(status), outcome, meaning) for status, outcome, meaning in rows] == statuses()


@pytest.mark.parametrize("script", ["slice.sh", "trainLoop.sh", "launch/exit-statuses.sh", "launch/slurm.sbatch"])
def test_shellcheck_finds_nothing(script: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "-x", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("status", "requeued"), [(0, ""), (75, "requeue 7\n"), (143, "requeue 7\n"), (2, ""), (1, "")])
def test_slurm_job_is_queued_again(tmp_path: Path, status: int, requeued: str) -> None:
    """Only where the trainer was stopped; the arguments reach it."""
    copy_loop(tmp_path)
    for name, script in (("srun", f'printf "%s\\n" "$@" >words; exit {status}'), ("scontrol", 'echo "$@" >calls')):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "calls").touch()
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = ["bash", str(REPOSITORY / "launch" / "slurm.sbatch"), "model.size=124m"]
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=30).returncode == status
    assert (tmp_path / "calls").read_text() == requeued
    program, resume, *overrides = (tmp_path / "words").read_text().splitlines()[-5:]
    assert (program, resume) == ("main_zero.py", "--resume=auto")
    config, _ = compose(overrides)
    assert config.data.checkpoint_directory == f"{tmp_path}/runs/slurm-7/checkpoints" and config.model.size == "124m"


def test_kubernetes_job() -> None:
    """Stops and disruptions are no failures, what would be refused again ends it; each host of the slice has a pod."""
    service, job = yaml.safe_load_all((REPOSITORY / "launch" / "gke-tpu.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule} == {
        "FailJob": with_outcome("refused"),
        "Ignore": with_outcome("stopped"),
    }
    assert all(rule["onExitCodes"]["containerName"] == container["name"] for rule in rules if "onExitCodes" in rule)
    config, _ = compose([*container["args"], "mode=plan"])
    chips = job["spec"]["completions"] * container["resources"]["limits"]["google.com/tpu"]
    assert config.plan.topology == f"v5e-{chips}" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_kubernetes_slices() -> None:
    """As of one slice; what would be refused again ends all of them, and each has a Job of its own."""
    _, one_slice = yaml.safe_load_all((REPOSITORY / "launch" / "gke-tpu.yaml").read_text())
    jobs = yaml.safe_load((REPOSITORY / "launch" / "gke-tpu-slices.yaml").read_text())
    assert jobs["metadata"]["annotations"] == {EXCLUSIVE: "cloud.google.com/gke-nodepool"}
    (rule,) = jobs["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (slices,) = jobs["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    assert slices["replicas"] > 1 and job["backoffLimit"] == 0
    for key in ("completions", "parallelism", "completionMode", "podFailurePolicy"):
        assert job[key] == one_slice["spec"][key]
    pod, other = job["template"]["spec"], one_slice["spec"]["template"]["spec"]
    (container,), (other_container,) = pod["containers"], other["containers"]
    assert container["resources"] == other_container["resources"] and pod["nodeSelector"] == other["nodeSelector"]
    topology = f"{slices['replicas']}xv5e-{job['completions'] * container['resources']['limits']['google.com/tpu']}"
    config, _ = compose([*container["args"], "mode=plan", f"plan.topology={topology}"])
    assert config.zero.replicas is None and config.data.bucket_path == "BUCKET"


def test_skypilot_task() -> None:
    """Its commands are accepted, and training that was stopped is started again."""
    task = yaml.safe_load((REPOSITORY / "launch" / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == with_outcome("stopped")
    values = task["envs"] | {"BUCKET": "b", "SKYPILOT_TASK_ID": "t"}
    for name, value in values.items():
        task["run"] = task["run"].replace(f"${name}", value)
    doctor, loop = (line.split() for line in task["run"].splitlines() if not line.startswith("#"))
    assert (doctor[1:3], loop[:2]) == (["main_zero.py", "--doctor"], ["exec", "./trainLoop.sh"])
    compose(doctor[3:])
    assert compose(loop[2:])[0].data.bucket_path == "b"


def test_image_has_what_it_copies() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    sent = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent and all((REPOSITORY / name).exists() for name in copied)
